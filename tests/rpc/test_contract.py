"""What a server may say: each number at its limits is taken, and beyond them refused by the name of its field."""

from __future__ import annotations

import math
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from tandem.rpc import wire
from tandem.rpc.received_errors import LEAST_RETRY_SECONDS, BrokenContract, contract, from_rpc
from tandem.rpc.wire import logprobs_from_wire
from tandem.rpc.wire_checks import MOST_NAME, MOST_ROWS, MOST_TOKENS
from tandem.rpc.wire_sessions import (
    STEPS_TOGETHER,
    answer_from_wire,
    draft_from_wire,
    run_message_from_wire,
    run_message_to_wire,
    run_step_from_wire,
    steps_from_wire,
)
from tandem.speculation.features import FeatureSpec
from tandem.speculation.rounds import RoundsLost
from tandem.speculation.run_on import RunMessage
from tandem.speculation.types import MAX_DRAFTED, InvalidField, ModelInfo, Request, Rule, Verdict
from tandem.v1 import draft_worker_pb2 as worker_pb
from tandem.v1 import generation_pb2 as generation_pb
from tandem.v1 import target_verifier_pb2 as pb

FEATURES = FeatureSpec((1, 2), 4)
TARGET = ModelInfo("m", "rev", "tok", 258, 160, 5, 4, "float32", "cpu", "torch")
PLAIN = Request()
ASKED = Request(margins=True, logprobs=1, features=FEATURES)
ROUND = pb.VerifyRequest(base_length=10, draft_tokens=[7, 8, 9])
LOGPROB = generation_pb.TokenLogprobs(logprob=-1, top_token_ids=[257], top_logprobs=[-0.5])


def answered(reply: pb.VerifyResponse, asked: pb.VerifyRequest, request: Request, seconds: float) -> Verdict:
    return answer_from_wire(reply, asked, request, TARGET, seconds)


def stepped(reply: pb.VerifyResponse, request: Request, seconds: float, rtt: float | None = None) -> Verdict:
    return run_step_from_wire(reply, 10, request, TARGET, seconds, rtt)


def reply(request: Request = PLAIN, **changes: Any) -> pb.VerifyResponse:
    """A verdict that accepts two of ROUND's drafts, with what is asked for; `changes` are made to it."""
    sound: dict[str, Any] = {"committed_length": 13, "token_ids": [7, 8, 257], "accepted": 2, "drafted": 3}
    if request.margins:
        sound["margins"] = [0.5, 0.0, math.inf]
    if request.logprobs is not None:
        sound["logprobs"] = [LOGPROB] * 3
    if request.features:
        sound["features"] = bytes(3 * request.features.position_bytes)
    return pb.VerifyResponse(**{**sound, **changes})


def shortly(value: object) -> str:
    return str(value)[:60]


def refusal(made: Any) -> str:
    with pytest.raises(InvalidField) as refused:
        made()
    return str(refused.value)


@pytest.mark.parametrize("request_", [PLAIN, ASKED], ids=["plain", "all asked for"])
def test_a_verdict_within_the_contract_is_taken_as_it_is(request_: Request) -> None:
    limits = {"step_rows": MOST_ROWS, "step_width": MOST_ROWS, "step_tokens": MOST_TOKENS}
    verdict = answered(reply(request_, queue_seconds=0.2, compute_seconds=0.3, **limits), ROUND, request_, 1.0)
    assert (verdict.token_ids, verdict.accepted) == ((7, 8, 257), 2)
    assert (verdict.queue_seconds, verdict.compute_seconds) == (0.2, 0.3)
    assert (verdict.rows, verdict.width, verdict.step_tokens) == (MOST_ROWS, MOST_ROWS, MOST_TOKENS)
    assert len(verdict.margins) == len(verdict.logprobs) == (3 if request_.margins else 0)
    step = stepped(reply(request_), request_, 1.0, 0.1)
    assert (step.token_ids, step.drafted, step.network_seconds) == ((7, 8, 257), 3, 0.1)


ROUNDS: list[tuple[dict[str, Any], str]] = [
    ({"accepted": 4}, "accepted: 4 of 3 drafts"),
    ({"accepted": 3, "token_ids": [7, 8, 1, 2], "committed_length": 14}, "token_ids: the id at 2 is not the draft's"),
    ({"replayed": True, "accepted": 6, "token_ids": [1] * 7, "committed_length": 17}, "accepted: 6 is outside 0 to 5"),
]
BOTH: list[tuple[dict[str, Any], str]] = [
    ({"token_ids": [], "accepted": 0}, "token_ids: 0 with 0 accepted drafts"),
    ({"token_ids": [7, 8], "committed_length": 12}, "token_ids: 2 with 2 accepted drafts"),
    ({"token_ids": [7, 8, *range(5000)], "committed_length": 5012}, "token_ids: 5002 with 2 accepted"),
    ({"token_ids": [7, 8, 258]}, "token_ids: the id at 2 is outside the vocabulary of 258"),
    ({"token_ids": [7, 8, 2**31 - 1]}, "token_ids: the id at 2"),
    ({"token_ids": [7, 8, 2**32 - 1]}, "token_ids: the id at 2"),
    ({"committed_length": 12}, "committed_length: 12 after 10 tokens and 3 more"),
    ({"committed_length": 2**32 - 1}, "committed_length: "),
    ({"step_rows": MOST_ROWS + 1}, "step_rows: "),
    ({"step_width": MOST_ROWS + 1}, "step_width: "),
    ({"step_tokens": MOST_TOKENS + 1}, "step_tokens: "),
    *(
        ({name: value}, f"{name}: {value} is not a finite number of seconds")
        for name in ("queue_seconds", "compute_seconds")
        for value in (math.nan, math.inf, -math.inf, -1e-9)
    ),
]
PARTS: list[tuple[dict[str, Any], str]] = [
    ({"margins": []}, "margins: 0 for 3 tokens"),
    ({"margins": [0.0] * 4}, "margins: 4 for 3 tokens"),
    ({"margins": [0.0, math.nan, 0.0]}, "margins: not all of them are numbers"),
    ({"logprobs": [LOGPROB] * 2}, "logprobs: 2 for 3 tokens"),
    ({"logprobs": []}, "logprobs: 0 for 3 tokens"),
    ({"features": b""}, "features: 0 for 48 bytes of 3 positions"),
    ({"features": bytes(49)}, "features: 49 for 48 bytes"),
    ({"features": bytes(2**20)}, "features: 1048576 for 48 bytes"),
]


@pytest.mark.parametrize(("changes", "said"), [*ROUNDS, *BOTH], ids=shortly)
def test_a_round_beyond_the_contract_is_refused_by_its_field(changes: dict[str, Any], said: str) -> None:
    assert refusal(lambda: answered(reply(**changes), ROUND, PLAIN, 1.0)).startswith(said)


STEPS: list[tuple[dict[str, Any], str]] = [
    ({"drafted": 6}, "drafted: 6 is outside 0 to 5"),
    ({"drafted": 2**32 - 1}, "drafted: 4294967295"),
    ({"drafted": 1}, "accepted: 2 of 1 drafts"),
]


@pytest.mark.parametrize(("changes", "said"), [*STEPS, *BOTH], ids=shortly)
def test_a_step_of_a_run_beyond_the_contract_is_refused_by_its_field(changes: dict[str, Any], said: str) -> None:
    assert refusal(lambda: stepped(reply(**changes), PLAIN, 1.0)).startswith(said)


@pytest.mark.parametrize(("changes", "said"), PARTS, ids=shortly)
def test_what_is_asked_for_comes_for_every_token(changes: dict[str, Any], said: str) -> None:
    assert refusal(lambda: answered(reply(ASKED, **changes), ROUND, ASKED, 1.0)).startswith(said)


@pytest.mark.parametrize("name", ["margins", "logprobs", "features"])
def test_what_was_not_asked_for_does_not_come(name: str) -> None:
    given = getattr(reply(ASKED), name)
    assert refusal(lambda: answered(reply(**{name: given}), ROUND, PLAIN, 1.0)).startswith(f"{name}: ")


def test_rejection_compares_no_scores_and_may_leave_margins_out() -> None:
    asked = Request(rule=Rule.REJECTION, margins=True)
    for margins in ([], [0.5, 0.5, 0.5]):
        assert answered(reply(margins=margins), ROUND, asked, 1.0)
    assert refusal(lambda: answered(reply(margins=[0.5]), ROUND, asked, 1.0))


def test_a_round_that_is_answered_again_may_have_had_another_draft() -> None:
    other = {"replayed": True, "token_ids": [7, 1, 2, 3], "accepted": 3, "committed_length": 14}
    verdict = answered(reply(**other), ROUND, PLAIN, 1.0)
    assert (verdict.token_ids, verdict.accepted) == ((7, 1, 2, 3), 1)
    step = stepped(reply(**other, drafted=0), PLAIN, 1.0)
    assert (step.accepted, step.drafted) == (3, 3)


def test_no_time_of_a_server_is_longer_than_the_wait_for_it() -> None:
    slow = reply(queue_seconds=1e308, compute_seconds=3000.0)
    verdict = answered(slow, ROUND, PLAIN, 0.25)
    assert (verdict.queue_seconds, verdict.compute_seconds) == (0.25, 0.25)
    assert stepped(slow, PLAIN, 0.5).compute_seconds == 0.5
    for value in (math.nan, math.inf, -1.0):
        assert refusal(lambda value=value: answered(reply(server_seconds=value), ROUND, PLAIN, 1.0))


def test_a_stale_reply_says_a_length_that_there_may_be() -> None:
    with pytest.raises(RoundsLost, match=f"holds {MOST_TOKENS} tokens"):
        answered(pb.VerifyResponse(stale=True, committed_length=MOST_TOKENS), ROUND, PLAIN, 1.0)
    stale = pb.VerifyResponse(stale=True, committed_length=MOST_TOKENS + 1)
    assert refusal(lambda: answered(stale, ROUND, PLAIN, 1.0)).startswith("committed_length: ")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"top_token_ids": [258]}, "logprobs.top_token_ids: the id at 0"),
        ({"top_token_ids": [1, 2], "top_logprobs": [0, 0]}, "logprobs.top_token_ids: 2 is outside 0 to 1"),
        ({"top_logprobs": []}, "logprobs.top_logprobs: 0 for 1 token ids"),
        ({"logprob": math.nan}, "logprobs: not all"),
        ({"top_logprobs": [math.nan]}, "logprobs: not all"),
    ],
)
def test_log_probabilities_beyond_the_contract_are_refused(changes: dict[str, Any], said: str) -> None:
    sound = {"logprob": -1.0, "top_token_ids": [257], "top_logprobs": [-math.inf]}
    assert logprobs_from_wire([generation_pb.TokenLogprobs(**sound)], 258, 1)[0].top == ((257, -math.inf),)
    wrong = generation_pb.TokenLogprobs(**{**sound, **changes})
    assert refusal(lambda: logprobs_from_wire([wrong], 258, 1)).startswith(said)


DRAFTS: list[tuple[dict[str, Any], str]] = [
    ({"draft_tokens": [1, 2, 3, 4]}, "draft_tokens: 4 where at most 3 were asked for"),
    ({"draft_tokens": [1, 300]}, "draft_tokens: the id at 1 is outside the vocabulary of 300"),
    ({"distributions": [{"token_ids": [1], "weights": [1.0]}]}, "distributions: 1 for 0 tokens that are verified by"),
    ({"queue_seconds": math.nan}, "queue_seconds: "),
    ({"compute_seconds": -1.0}, "compute_seconds: "),
    ({"step_rows": MOST_ROWS + 1}, "step_rows: "),
    ({"doubted": True, "draft_tokens": [1, 2, 3]}, "doubted: of a draft of 3 tokens where 3 were asked for"),
]


def test_a_proposal_is_cut_where_the_target_knows_no_further() -> None:
    sound = worker_pb.ProposeResponse(draft_tokens=[1, 299, 2], proposed_by=["ngram"] * 3, compute_seconds=9.0)
    draft = draft_from_wire(sound, 300, 258, 3, Rule.AGREEMENT, 0.5)
    assert (draft.token_ids, draft.compute_seconds, len(draft.proposed_by)) == ((1,), 0.5, 1)


@pytest.mark.parametrize(("changes", "said"), DRAFTS, ids=shortly)
def test_a_proposal_beyond_the_contract_is_refused_by_its_field(changes: dict[str, Any], said: str) -> None:
    wrong = worker_pb.ProposeResponse(**{"draft_tokens": [1], **changes})
    assert refusal(lambda: draft_from_wire(wrong, 300, 258, 3, Rule.AGREEMENT, 1.0)).startswith(said)


INFO = {"vocab_size": 258, "max_sequence_length": 160, "max_speculation_length": 5}


@pytest.mark.parametrize(
    ("name", "most", "least"),
    [
        ("vocab_size", MOST_TOKENS, 1),
        ("max_sequence_length", MOST_TOKENS, 2),
        ("max_speculation_length", MAX_DRAFTED, 0),
        ("default_speculation_length", MAX_DRAFTED, 0),
        ("kv_slots", MOST_ROWS, 0),
        ("plain_width", MOST_ROWS, 0),
        ("feature_size", MOST_ROWS, 0),
    ],
)
def test_a_description_beyond_what_there_may_be_is_refused(name: str, most: int, least: int) -> None:
    for value in (most, least):
        assert getattr(wire.info_from_wire(generation_pb.ModelInfo(**{**INFO, name: value})), name) == value
    for value in (most + 1, 2**32 - 1, *((least - 1,) if least else ())):
        wrong = generation_pb.ModelInfo(**{**INFO, name: value})
        assert refusal(lambda wrong=wrong: wire.info_from_wire(wrong)).startswith(f"{name}: {value} is outside")


@pytest.mark.parametrize(
    "changes",
    [
        {"startup_seconds": math.nan},
        {"end_of_sequence_ids": [258]},
        {"end_of_sequence_ids": [1] * (wire.MOST_LISTED + 1)},
        {"feature_layers": [1] * (wire.MOST_LISTED + 1)},
        {"adapters": [generation_pb.Adapter()] * (wire.MOST_LISTED + 1)},
    ],
    ids=shortly,
)
def test_a_description_with_lists_and_times_that_cannot_be_is_refused(changes: dict[str, Any]) -> None:
    assert refusal(lambda: wire.info_from_wire(generation_pb.ModelInfo(**{**INFO, **changes})))


def test_a_client_is_told_of_ends_and_chunks_that_cannot_be() -> None:
    end = generation_pb.GenerateCompletion(finish_reason=4)
    assert wire.completion_from_wire(end).finish_reason.value == 4
    for reason in (0, 5, 77):
        wrong = generation_pb.GenerateCompletion(finish_reason=reason)
        assert refusal(lambda wrong=wrong: wire.completion_from_wire(wrong)).startswith(f"finish_reason: {reason} is")
    for name in ("draft_seconds", "verify_seconds", "queue_seconds", "network_seconds", "prefill_seconds"):
        end = generation_pb.GenerateCompletion(finish_reason=4, stats={name: math.nan})
        assert refusal(lambda end=end: wire.completion_from_wire(end)).startswith(f"{name}: ")
    long = generation_pb.GenerateCompletion(finish_reason=4, stats={"sent_by_depth": [1] * (wire.MOST_LISTED + 1)})
    assert refusal(lambda: wire.completion_from_wire(long)).startswith("sent_by_depth: ")
    for changes in ({"margins": [0.0]}, {"logprobs": [LOGPROB] * 3}, {"token_ids": [2**32 - 1]}):
        chunk = generation_pb.GenerateChunk(**{"token_ids": [1, 2], **changes})
        assert refusal(lambda chunk=chunk: wire.chunk_from_wire(chunk))


def test_what_breaks_the_contract_names_who_did_and_is_that_servers_failure() -> None:
    with pytest.raises(BrokenContract) as broken, contract("the TargetVerifier at a:1"):
        raise InvalidField("accepted", "9 of 4 drafts")
    error = broken.value
    assert (error.code, error.reason) == ("UNAVAILABLE", "CONTRACT_BROKEN")
    assert error.message == "the TargetVerifier at a:1 broke the contract: accepted: 9 of 4 drafts"
    assert MOST_NAME == 256


class Failed(grpc.RpcError):
    """A call that failed, with a status in its trailing metadata."""

    def __init__(self, details: list[any_pb2.Any], code: int = 14) -> None:
        status = status_pb2.Status(code=code, message="gone", details=details)
        self._metadata = rpc_status.to_status(status).trailing_metadata

    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.UNAVAILABLE

    def details(self) -> str:
        return "gone"

    def trailing_metadata(self) -> Any:
        return self._metadata


def packed(message: Any) -> any_pb2.Any:
    found = any_pb2.Any()
    found.Pack(message)
    return found


def test_details_of_a_status_that_are_none_leave_code_and_text() -> None:
    retry = error_details_pb2.RetryInfo()
    retry.retry_delay.seconds = -5
    broken = packed(error_details_pb2.ErrorInfo(reason="x"))
    broken.value = b"\xff\xff\xff"
    found = from_rpc(Failed([packed(retry)]))
    assert (found.code, found.message, found.retry_seconds) == ("UNAVAILABLE", "gone", LEAST_RETRY_SECONDS)
    for error in (Failed([broken]), Failed([packed(retry)], code=5)):
        assert (from_rpc(error).code, from_rpc(error).message) == ("UNAVAILABLE", "gone")


def test_features_that_are_no_numbers_count_as_zero() -> None:
    spec = FeatureSpec((1,), 4)
    for byte in (b"\xff", b"\x7f", b"\x80", b"\x7f\x80", b"\x80\x7f"):
        values = spec.decode((byte * spec.position_bytes)[: spec.position_bytes])
        assert values.shape == (1, 4) and np.isfinite(values).all()


def test_a_runs_message_says_how_long_a_copy_may_be_and_the_target_bounds_it() -> None:
    message = RunMessage(3, 7, (1, 2), 20, 4, 5)
    wire = run_message_to_wire(message, pb.VerifyRequest())
    assert run_message_from_wire(wire, 5) == message
    assert run_message_from_wire(wire, 2) == RunMessage(3, 7, (1, 2), 20, 2, 2)
    wire.ClearField("max_step_copies")  # of a client that knows of no copies
    assert run_message_from_wire(wire, 5).most_copies == 0


def a_step(length: int, *after: pb.VerifyResponse) -> pb.VerifyResponse:
    return pb.VerifyResponse(token_ids=[7], committed_length=length, messages_read=1, next_steps=after)


def test_a_reply_holds_its_own_step_and_those_after_it_in_order() -> None:
    most = a_step(1, *(a_step(2 + i) for i in range(STEPS_TOGETHER - 1)))
    assert [step.committed_length for step in steps_from_wire(most)] == list(range(1, STEPS_TOGETHER + 1))
    assert steps_from_wire(a_step(5)) == [a_step(5)]


def test_the_reply_to_a_round_holds_no_further_steps() -> None:
    with pytest.raises(InvalidField, match="next_steps: 1 is outside 0 to 0"):
        answered(a_step(4, a_step(5)), pb.VerifyRequest(base_length=3), PLAIN, 1.0)


@pytest.mark.parametrize(
    "reply, says",
    [
        (a_step(1, *(a_step(2 + i) for i in range(STEPS_TOGETHER))), "next_steps: 32 are above 31"),
        (a_step(1, a_step(2, a_step(3))), "next_steps: one of them has next_steps of its own"),
    ],
    ids=["too many", "nested"],
)
def test_a_reply_that_holds_more_than_it_may_breaks_the_contract(reply: pb.VerifyResponse, says: str) -> None:
    with pytest.raises(InvalidField, match=says):
        steps_from_wire(reply)
