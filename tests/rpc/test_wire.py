"""What goes onto the wire comes back from it, through bytes."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.rpc import wire
from tandem.rpc.wire_checks import MOST_ROWS, MOST_TOKENS
from tandem.rpc.wire_sessions import (
    MAX_SUPPORT,
    VerdictBounds,
    answer_from_wire,
    distributions_from_wire,
    distributions_to_wire,
    proposing_from_wire,
    proposing_to_wire,
)
from tandem.speculation.chat import ChatMessage, ToolCall
from tandem.speculation.request import Drafts
from tandem.speculation.types import (
    MAX_DRAFTED,
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
from tandem.v1 import target_verifier_pb2 as verifier_pb

repeatable = settings(derandomize=True, database=None, deadline=None, max_examples=80)

uint32 = st.integers(0, 2**32 - 1)
uint64 = st.integers(0, 2**64 - 1)
counts = st.integers(0, 2**31)
seconds = st.floats(0, 1e9)
float32 = st.floats(0, 1e6, width=32)
text = st.text(max_size=20)
samplings = st.builds(
    SamplingParams,
    temperature=st.floats(0, 100),
    top_k=uint32,
    top_p=st.floats(0, 1, exclude_min=True),
    min_p=st.floats(0, 1),
    seed=uint64,
    logit_bias=st.dictionaries(uint32, st.floats(-100, 100), max_size=4).map(lambda of: tuple(sorted(of.items()))),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    repetition_penalty=st.floats(0.01, 2),
    structure=st.none() | st.builds(Structure, st.just(StructureKind.REGEX), st.text(min_size=1, max_size=9)),
)
tops = st.lists(st.tuples(st.integers(0, MOST_TOKENS - 1), st.floats(allow_nan=False)), max_size=3).map(tuple)
each_logprobs = st.builds(TokenLogprobs, st.floats(allow_nan=False), tops)
ids = st.lists(uint32, max_size=8).map(tuple)
common = {
    "adapter": text,
    "sampling": samplings,
    "chat": st.booleans(),
    "max_new_tokens": st.none() | st.integers(1, 2**32 - 1),
    "max_total_tokens": st.none() | st.integers(2, 2**32 - 1),
    "speculation_length": st.none() | st.integers(1, 2**32 - 1),
    "stop_token_ids": ids,
    "stop_strings": st.lists(st.text(min_size=1, max_size=5), max_size=3).map(tuple),
    "ignore_end_of_sequence": st.booleans(),
    "margins": st.booleans(),
    "rule": st.sampled_from(Rule),
    "drafts": st.sampled_from([each for each in Drafts if each is not Drafts.NONE]),
    "prediction": st.just(""),
    "logprobs": st.none() | st.integers(0, 20),
}
tool_calls = st.builds(
    ToolCall, id=text, name=st.text(min_size=1, max_size=9), arguments=st.just("") | st.just('{"a":1}')
)
messages = st.builds(ChatMessage, role=st.sampled_from(["system", "user"]), content=text, name=text) | st.builds(
    ChatMessage, role=st.just("assistant"), content=text, tool_calls=st.lists(tool_calls, max_size=2).map(tuple)
)
answers = st.builds(ChatMessage, role=st.just("tool"), content=text, tool_call_id=text)
chats = st.lists(messages | answers, min_size=1, max_size=4).map(tuple)
requests = (
    st.builds(GenerationRequest, text=text, **common)
    | st.builds(GenerationRequest, text=text, **(common | {"prediction": text, "drafts": st.just(Drafts.LOOKUP)}))
    | st.builds(GenerationRequest, token_ids=ids, **common)
    | st.builds(GenerationRequest, messages=chats, **(common | {"chat": st.just(False)}))
)
distributions = st.dictionaries(
    uint32, st.floats(0, width=32, exclude_min=True, allow_infinity=False), min_size=1, max_size=8
).map(lambda weights: SparseDistribution(tuple(sorted(weights)), tuple(weights[v] for v in sorted(weights))))
stats = st.builds(
    SpeculationStats,
    rounds=counts,
    drafted=st.integers(50, 99),
    accepted=st.integers(0, 50),
    accepted_per_position=st.lists(counts, max_size=5),
    drafted_per_position=st.lists(counts, max_size=5),
    draft_seconds=seconds,
    verify_seconds=seconds,
    queue_seconds=seconds,
    network_seconds=seconds,
    prefill_seconds=seconds,
    bytes_up=uint64,
    bytes_down=uint64,
    drafted_by=st.dictionaries(text, uint32, max_size=3),
    accepted_by=st.dictionaries(text, uint32, max_size=3),
    stale_rounds=counts,
    stale_drafts=counts,
    sent_by_depth=st.lists(counts, max_size=5),
    guessed_rounds=counts,
)
completions = st.builds(GenerationEnd, st.sampled_from(FinishReason), counts, counts, stats)
known = st.integers(0, MOST_TOKENS - 1)
chunks = st.integers(0, 5).flatmap(
    lambda count: st.builds(
        Chunk,
        *(st.tuples(*[known] * count), text, st.just(()) | st.tuples(*[float32] * count)),
        st.just(()) | st.tuples(*[each_logprobs] * count),
    )
)
PRINTABLE = st.characters(exclude_categories=("C", "Z"), include_characters=" ")
names = st.text(PRINTABLE, max_size=20)  # others are escaped: test_forged_lines.py
infos = st.builds(
    ModelInfo,
    adapters=st.lists(st.tuples(names, names), max_size=3).map(tuple),
    model_name=names,
    weights_revision=names,
    tokenizer_sha256=names,
    vocab_size=st.integers(2**20, MOST_TOKENS),
    max_sequence_length=st.integers(2, MOST_TOKENS),
    max_speculation_length=st.integers(0, MAX_DRAFTED),
    kv_slots=st.integers(0, MOST_ROWS),
    dtype=names,
    device=names,
    backend=names,
    draft_name=names,
    default_speculation_length=st.integers(0, MAX_DRAFTED),
    adaptive_speculation_length=st.booleans(),
    plain_width=st.integers(0, MOST_ROWS),
    bit_exact=st.booleans(),
    startup_seconds=seconds,
    end_of_sequence_ids=st.lists(st.integers(0, 2**20 - 1), max_size=8).map(tuple),
)
BOUNDS = VerdictBounds(258, 5, Request())


def through_bytes(message: Any) -> Any:
    return type(message).FromString(message.SerializeToString())


@repeatable
@given(samplings)
def test_sampling(sampling: SamplingParams) -> None:
    assert wire.sampling_from_wire(through_bytes(wire.sampling_to_wire(sampling))) == sampling


@repeatable
@given(requests)
def test_a_generation_request(request: GenerationRequest) -> None:
    assert wire.generation_from_wire(through_bytes(wire.generation_to_wire(request))) == request


@repeatable
@given(chunks)
def test_a_chunk(chunk: Chunk) -> None:
    assert wire.chunk_from_wire(through_bytes(wire.chunk_to_wire(chunk))) == chunk


@repeatable
@given(completions)
def test_a_completion_and_its_statistics(completion: GenerationEnd) -> None:
    message = through_bytes(wire.completion_to_wire(completion))
    assert wire.completion_from_wire(message) == completion
    assert message.stats.wasted_drafts == completion.stats.wasted_drafts


@repeatable
@given(infos)
def test_model_information(info: ModelInfo) -> None:
    assert wire.info_from_wire(through_bytes(wire.info_to_wire(info))) == info


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
    """A field that is added to the contract and forgotten here would stay empty."""
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
    assert len(message.ListFields()) == len(pb.GenerateCompletion.DESCRIPTOR.fields)
    assert len(message.stats.ListFields()) == len(pb.SpeculationStats.DESCRIPTOR.fields)
    structure = Structure(StructureKind.REGEX, "a")
    sampling = SamplingParams(1, 1, 0.5, 0.5, 1, ((1, 0.5),), 0.1, 0.2, 1.3, structure)
    assert len(wire.sampling_to_wire(sampling).ListFields()) == len(pb.Sampling.DESCRIPTOR.fields)
    assert not math.isnan(message.stats.draft_seconds)


@repeatable
@given(distributions)
def test_what_a_draft_token_was_drawn_from_bit_for_bit(sent: SparseDistribution) -> None:
    (message,) = distributions_to_wire([sent])
    assert distributions_from_wire([through_bytes(message)], [sent.token_ids[-1]]) == (sent,)


def test_every_rule_has_its_name_on_the_wire_and_unspecified_is_agreement() -> None:
    for rule in Rule:
        assert pb.VerificationRule.Name(wire.rule_to_wire(rule)) == f"VERIFICATION_RULE_{rule.name}"
        assert wire.rule_from_wire(wire.rule_to_wire(rule)) is rule
        assert wire.rule_name(wire.rule_to_wire(rule)) == rule.value
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


def test_of_a_round_what_the_server_did_not_take_is_the_networks() -> None:
    reply = verifier_pb.VerifyResponse(token_ids=[1, 2], accepted=1, committed_length=9, server_seconds=0.25)
    asked = verifier_pb.VerifyRequest(base_length=7, draft_tokens=[1])
    answer = answer_from_wire(reply, asked, BOUNDS, 1.0)
    assert (answer.network_seconds, answer.committed_length) == (0.75, 9)
    assert answer.verdict is not None and answer.verdict.token_ids == (1, 2)
    assert answer_from_wire(reply, asked, BOUNDS, 0.125).network_seconds == 0.0  # two clocks, and neither goes back
    reply.stale = True
    assert answer_from_wire(reply, asked, BOUNDS, 1.0).verdict is None
