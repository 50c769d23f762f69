"""What goes onto the wire comes back from it, through bytes."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from tandem.rpc import wire
from tandem.rpc.wire_sessions import distributions_from_wire, distributions_to_wire
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
    Rule,
    SamplingParams,
    SparseDistribution,
    SpeculationStats,
    Structure,
    StructureKind,
    TokenLogprobs,
)
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
    assert (wire.rule_name(0), wire.rule_name(9)) == ("nothing", "9")


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
