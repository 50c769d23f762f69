"""Runs that are fuzzed: each begins as it should, and then gets messages of which any field may be anything."""

from __future__ import annotations

import queue
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import grpc
from hypothesis import strategies as st

from tandem.rpc.channel import TARGET, stub
from tandem.speculation.types import MAX_DRAFTED
from tandem.v1 import generation_pb2
from tandem.v1 import target_verifier_pb2 as pb
from tests.reliability.fuzzed import SECONDS, Servers
from tests.reliability.messages import LONGEST, VOCABULARY
from tests.support import GREEDY, oracle

PROMPT = tuple(b"fuzzed")
TEXT = (*PROMPT, *oracle(PROMPT, GREEDY, LONGEST - len(PROMPT), past_the_end=True))
FIELDS = {
    "session_id", "run_until", "draft_tokens", "distributions", "last_token", "stop_token_ids",
}  # fmt: skip
"""Fields that a refusal of a message may name."""

_token = st.sampled_from([0, 1, 255, VOCABULARY - 1]) | st.integers(0, VOCABULARY - 1)
_any_token = st.integers(0, 40).flatmap(
    lambda n: _token if n else st.sampled_from([VOCABULARY, 2**31, 2**32 - 1])
)  # fmt: skip
_length = st.integers(0, LONGEST) | st.sampled_from([0, LONGEST + 1, 2**31 - 1, 2**32 - 1])


@st.composite
def _path(draw: Any, base: int) -> list[int]:
    """Tokens after `base`: the truth for a while, then anything."""
    right = TEXT[base : base + draw(st.integers(0, 9))] if base < len(TEXT) else ()
    return [*right, *draw(st.lists(_any_token, max_size=4))]


@st.composite
def run_messages(draw: Any) -> dict[str, Any]:
    """The fields of one message. `base_length` and `last_token` fit where the truth is known, mostly."""
    base = draw(st.integers(1, LONGEST - 1) | _length)
    last = TEXT[base - 1] if 1 <= base <= len(TEXT) and draw(st.integers(0, 4)) else draw(_any_token)
    draft = draw(_path(base)) if draw(st.integers(0, 19)) else [1] * (MAX_DRAFTED + draw(st.integers(0, 1)))
    fields: dict[str, Any] = {
        "session_id": "s", "base_length": base, "last_token": last, "draft_tokens": draft,
        "run_until": draw(st.integers(1, LONGEST) | _length), "max_step_drafts": draw(st.integers(0, 6) | _length),
    }  # fmt: skip
    if not draw(st.integers(0, 9)):
        strange = st.sampled_from(
            [
                {"session_id": "another"},
                {"run_until": None},
                {"distributions": [generation_pb2.SparseDistribution(token_ids=[1], weights=[1.0])]},
                {"stop_token_ids": [1] * 300},
            ]
        )
        fields |= draw(strange)
    return fields


@dataclass(frozen=True, slots=True)
class FuzzedRun:
    """What a run said: the tokens of its steps, its status, and the field that its refusal names."""

    tokens: list[int]
    status: str
    says: str


def fuzzed_run(servers: Servers, messages: list[dict[str, Any]], begin: int, early: bool = False) -> FuzzedRun:
    """Opens a session, runs it for `begin` tokens, sends the messages, and closes it. Every step is compared.

    `early`: the run and its messages are sent before the opening.
    """
    target, name = stub(servers.channels[TARGET], TARGET), uuid.uuid4().hex
    opening = pb.OpenSessionRequest(
        session_id=name, prefix=PROMPT, prompt_length=len(PROMPT), sampling={"temperature": 0.0}
    )
    waiting: queue.SimpleQueue[pb.VerifyRequest | None] = queue.SimpleQueue()
    first = {"base_length": len(PROMPT), "last_token": PROMPT[-1], "run_until": len(PROMPT) + begin}
    first |= {"opening_sent": early}
    for fields in ({"session_id": "s", **first}, *messages):
        named = fields | ({"session_id": name} if fields["session_id"] == "s" else {})
        waiting.put(pb.VerifyRequest(**named))
    waiting.put(None)
    tokens: list[int] = []
    status, says = "OK", ""
    if not early:
        target.OpenSession(opening, timeout=SECONDS)
    replies = target.VerifyStream(_sent(waiting), timeout=SECONDS)
    if early:
        target.OpenSession(opening, timeout=SECONDS)
    try:
        for reply in replies:
            assert not reply.stale and reply.committed_length == len(PROMPT) + len(tokens) + len(reply.token_ids)
            assert reply.accepted <= reply.drafted == min(reply.drafted, 5)
            tokens += reply.token_ids
    except grpc.RpcError as error:
        status, says = error.code().name, error.details() or ""
    servers.answered[status] += 1
    closed = target.CloseSession(pb.CloseSessionRequest(session_id=name), timeout=SECONDS)
    assert closed.closed and closed.committed_length <= LONGEST
    assert tuple(tokens) == TEXT[len(PROMPT) : len(PROMPT) + len(tokens)]
    return FuzzedRun(tokens, status, says)


def _sent(waiting: queue.SimpleQueue[pb.VerifyRequest | None]) -> Iterator[pb.VerifyRequest]:
    while (message := waiting.get()) is not None:
        yield message
