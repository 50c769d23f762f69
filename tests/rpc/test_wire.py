"""What goes onto the wire comes back from it, through bytes."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from tandem.rpc import wire
from tandem.rpc.wire_sessions import (
    MAX_SUPPORT,
    distributions_from_wire,
    distributions_to_wire,
    proposing_from_wire,
    proposing_to_wire,
)
from tandem.speculation.chat import ChatMessage, ToolCall
from tandem.speculation.request import Drafts
from tandem.speculation.types import (
    SAMPLING_FIELDS,
    Chunk,
    FinishReason,
    GenerationEnd,
    GenerationRequest,
    InvalidField,
    ModelInfo,
    Rehearsal,
    Request,
    Rule,
    SamplingParams,
    SparseDistribution,
    SpeculationStats,
    Structure,
    StructureKind,
    TokenLogprobs,
)
from tandem.v1 import draft_worker_pb2 as worker_pb
from tandem.v1 import generation_pb2 as pb

SAMPLING = SamplingParams(0.9, 40, 0.95, 0.01, 2**64 - 1, ((3, -1.5), (9, 2.0)), 0.5, 0.25, 1.1)
STRUCTURED = replace(SAMPLING, structure=Structure(StructureKind.REGEX, "\u00e9+\n"))
CALL = ToolCall("c1", "look", '{"a":1}')
CHAT = (
    ChatMessage("system", "s", "n"),
    ChatMessage("assistant", "", tool_calls=(CALL, replace(CALL, id="c2"))),
    ChatMessage("tool", "said", tool_call_id="c1"),
)
COMMON = {
    "sampling": STRUCTURED, "max_new_tokens": 2**32 - 1, "max_total_tokens": 2, "speculation_length": 3,
    "stop_token_ids": (0, 2**32 - 1), "stop_strings": ("x", "\u00e9"), "ignore_end_of_sequence": True, "margins": True,
    "logprobs": 20, "adapter": "red",
}  # fmt: skip
LOGPROBS = (TokenLogprobs(-0.5, ((7, -0.5), (8, -math.inf))), TokenLogprobs(-1.0))


def through_bytes(message: Any) -> Any:
    return type(message).FromString(message.SerializeToString())


@pytest.mark.parametrize("kind", StructureKind)
def test_sampling(kind: StructureKind) -> None:
    text = {StructureKind.JSON_SCHEMA: "{}", StructureKind.CHOICE: '["a"]'}.get(kind, "a")
    for sampling in (SAMPLING, replace(SAMPLING, structure=Structure(kind, text)), SamplingParams()):
        assert wire.sampling_from_wire(through_bytes(wire.sampling_to_wire(sampling))) == sampling


@pytest.mark.parametrize(
    "request_",
    [
        GenerationRequest(text="t", chat=True, rule=Rule.AGREEMENT, receipt=True, **COMMON),
        GenerationRequest(text="", prediction="p", **COMMON),
        GenerationRequest(token_ids=(1, 2**32 - 1), rule=Rule.REJECTION, **COMMON),
        GenerationRequest(messages=CHAT, drafts=Drafts.HEAD, **COMMON),
    ],
    ids=["text", "prediction", "tokens", "chat"],
)
def test_a_generation_request(request_: GenerationRequest) -> None:
    assert wire.generation_from_wire(through_bytes(wire.generation_to_wire(request_))) == request_


@pytest.mark.parametrize("chunk", [Chunk((), ""), Chunk((7, 8), "ab\u00e9", (0.5, math.inf), LOGPROBS)])
def test_a_chunk(chunk: Chunk) -> None:
    assert wire.chunk_from_wire(through_bytes(wire.chunk_to_wire(chunk))) == chunk


def test_absent_fields_take_the_defaults_of_the_contract() -> None:
    assert wire.sampling_from_wire(pb.Sampling()) == SamplingParams()
    request = wire.generation_from_wire(pb.Generation(text="x"))
    assert request == GenerationRequest(text="x", unset_sampling=frozenset(SAMPLING_FIELDS))
    assert request.max_new_tokens is request.speculation_length is request.max_total_tokens is None


@pytest.mark.parametrize("drafts", Drafts)
def test_what_drafts_crosses_the_wire_and_auto_is_left_out(drafts: Drafts) -> None:
    message = through_bytes(wire.generation_to_wire(GenerationRequest(text="x", drafts=drafts)))
    assert wire.generation_from_wire(message).drafts is drafts
    assert any(field.name == "drafts" for field, _ in message.ListFields()) == (drafts is not Drafts.AUTO)
    first = worker_pb.ProposeRequest()
    proposing_to_wire(Request(drafts=drafts), first)
    assert proposing_from_wire(through_bytes(first)).drafts is drafts


def test_an_empty_list_of_ids_is_a_prompt_and_no_prompt_is_none() -> None:
    request = GenerationRequest(token_ids=())
    assert wire.generation_from_wire(through_bytes(wire.generation_to_wire(request))) == request
    with pytest.raises(InvalidField, match="missing"):
        wire.generation_from_wire(pb.Generation())


def test_every_field_of_the_messages_is_filled() -> None:
    told = Rehearsal("target", "n", "d", "s", 10, 2, 0.5)
    sizes = (1, 2, 3, 4, "d", "c", "b", "m", 5, 6, True, 7.0, (8,), True, (("a", "r"),), (2,), 9)
    info = ModelInfo("n", "r", "t", *sizes, (told,), "s", "k", 10)
    message = wire.info_to_wire(info)
    assert len(message.ListFields()) == len(pb.ModelInfo.DESCRIPTOR.fields)
    assert len(message.rehearsals[0].ListFields()) == len(pb.Rehearsal.DESCRIPTOR.fields)
    valid = replace(info, vocab_size=10)
    assert wire.info_from_wire(through_bytes(wire.info_to_wire(valid))) == valid
    full = SpeculationStats(
        1, 3, 2, [1], [1], 1.0, 1.0, 1.0, 1.0, 1.0, 1, 1, {"model": 3}, {"model": 2}, 1, 1, [1], 1, 1, "", 1, 1, 1, 1
    )
    message = wire.completion_to_wire(GenerationEnd(FinishReason.LENGTH, 1, 1, full, "{}"))
    assert wire.completion_from_wire(through_bytes(message)) == GenerationEnd(
        FinishReason.LENGTH, 1, 1, replace(full, verifiers=[]), "{}"
    )
    assert len(message.ListFields()) == len(pb.GenerateCompletion.DESCRIPTOR.fields)
    assert len(message.stats.ListFields()) == len(pb.SpeculationStats.DESCRIPTOR.fields)
    structure = Structure(StructureKind.REGEX, "a")
    sampling = SamplingParams(1, 1, 0.5, 0.5, 1, ((1, 0.5),), 0.1, 0.2, 1.3, structure)
    assert len(wire.sampling_to_wire(sampling).ListFields()) == len(pb.Sampling.DESCRIPTOR.fields)
    assert not math.isnan(message.stats.draft_seconds)


def test_what_a_draft_token_was_drawn_from_bit_for_bit() -> None:
    sent = SparseDistribution((1, 5, 2**32 - 1), (2.0**-20, 0.5, 3.0))
    (message,) = distributions_to_wire([sent])
    assert distributions_from_wire([through_bytes(message)], [sent.token_ids[-1]]) == (sent,)


def test_every_rule_has_its_name_on_the_wire_and_unspecified_is_agreement() -> None:
    for rule in Rule:
        assert pb.VerificationRule.Name(wire.RULES[rule]) == f"VERIFICATION_RULE_{rule.name}"
        assert wire.rule_from_wire(wire.RULES[rule]) is rule
        assert wire.rule_name(wire.RULES[rule]) == rule.value
    assert wire.rule_from_wire(pb.VERIFICATION_RULE_UNSPECIFIED) is Rule.AGREEMENT
    assert (wire.rule_name(0), wire.rule_name(9)) == ("nothing", "9")


ABOVE = MAX_SUPPORT + 1
WRONG = [
    ("distributions[0].token_ids", [f"{ABOVE} are above the limit of 1024"], [1], [(range(ABOVE), [1.0])]),
    ("distributions[0].weights", [f"{ABOVE} are above the limit of 1024"], [1], [([1], [1.0] * ABOVE)]),
    ("distributions", [], [1], [([1], [1.0]), ([2], [1.0])]),
    ("distributions", [], [1, 2], [([1], [1.0])]),
    ("distributions[0].token_ids", ["empty"], [1], [([], [])]),
    ("distributions[1].token_ids", ["3 follows 3"], [1, 3], [([1], [1.0]), ([3, 3], [1.0, 1.0])]),
    ("distributions[0].token_ids", ["1 follows 2"], [1], [([2, 1], [1.0, 1.0])]),
    ("distributions[0].weights", ["1 for 2"], [1], [([1, 2], [1.0])]),
    ("distributions[0].weights", ["0.0"], [1], [([1, 2], [1.0, 0.0])]),
    ("distributions[0].weights", ["-1.0"], [1], [([1, 2], [1.0, -1.0])]),
    ("distributions[0].weights", ["nan"], [1], [([1, 2], [1.0, math.nan])]),
    ("distributions[0].weights", ["inf"], [1], [([1, 2], [1.0, math.inf])]),
    ("draft_tokens", ["token 7 at 1"], [1, 7], [([1], [1.0]), ([2], [1.0])]),
]


@pytest.mark.parametrize(("field", "said", "draft", "given"), WRONG)
def test_a_distribution_that_no_token_can_have_come_from_is_refused(field, said, draft, given) -> None:
    messages = [pb.SparseDistribution(token_ids=ids, weights=weights) for ids, weights in given]
    with pytest.raises(InvalidField) as caught:
        distributions_from_wire(messages, draft)
    assert caught.value.field == field
    assert str(caught.value).startswith(f"{field}: ")
    for part in said:
        assert part in str(caught.value)
