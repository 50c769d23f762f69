"""Converts domain data to protobuf and back; `..._from_wire` raise InvalidField naming the field."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import asdict, fields
from typing import Any

from tandem.rpc import wire_checks as check
from tandem.rpc.logs import printable
from tandem.speculation.chat import ChatMessage, ToolCall, check_counts
from tandem.speculation.request import Drafts
from tandem.speculation.sampling import MAX_BIASES
from tandem.speculation.types import (
    MAX_DRAFTED,
    MAX_LOGPROBS,
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
    SpeculationStats,
    Structure,
    StructureKind,
    TokenLogprobs,
)
from tandem.v1 import generation_pb2 as pb

RULES = {Rule.AGREEMENT: pb.VERIFICATION_RULE_AGREEMENT, Rule.REJECTION: pb.VERIFICATION_RULE_REJECTION}


def rule_from_wire(value: int) -> Rule:
    if value == pb.VERIFICATION_RULE_UNSPECIFIED:
        return Rule.AGREEMENT
    return check.member("rule", value, RULES, "verification rule")


def rule_name(value: int) -> str:
    # A message may name an unknown rule.
    names = {int(known): rule.value for rule, known in RULES.items()}
    return names.get(value, str(value) if value else "nothing")


DRAFTS = {
    Drafts.AUTO: pb.DRAFTS_UNSPECIFIED,
    Drafts.NONE: pb.DRAFTS_NONE,
    Drafts.LOOKUP: pb.DRAFTS_LOOKUP,
    Drafts.MODEL: pb.DRAFTS_MODEL,
    Drafts.HEAD: pb.DRAFTS_HEAD,
}


_OPTIONAL = ("max_new_tokens", "speculation_length", "max_total_tokens", "logprobs")
_PLAIN = ("chat", "ignore_end_of_sequence", "adapter", "receipt", "prediction")
_TUPLES = ("stop_token_ids", "stop_strings")


def generation_to_wire(request: GenerationRequest) -> pb.Generation:
    message = pb.Generation(
        sampling=sampling_to_wire(request.sampling, request.unset_sampling),
        report_margins=request.margins,
        rule=RULES[request.rule],
        drafts=DRAFTS[request.drafts],
        **{name: getattr(request, name) for name in (*_OPTIONAL, *_PLAIN, *_TUPLES)},
    )
    if request.messages is not None:
        message.messages.CopyFrom(pb.ChatMessages(messages=[asdict(each) for each in request.messages]))
    elif request.token_ids is not None:
        message.token_ids.ids.extend(request.token_ids)
        message.token_ids.SetInParent()
    else:
        message.text = request.text or ""
    return message


def generation_from_wire(message: pb.Generation) -> GenerationRequest:
    kind = message.WhichOneof("prompt")
    if kind is None:
        raise InvalidField("prompt", "missing: give text, token_ids or messages")
    values: dict[str, Any] = {name: getattr(message, name) for name in _OPTIONAL if message.HasField(name)}
    values |= {name: getattr(message, name) for name in _PLAIN}
    values |= {name: tuple(getattr(message, name)) for name in _TUPLES}
    return GenerationRequest(
        text=message.text if kind == "text" else None,
        token_ids=tuple(message.token_ids.ids) if kind == "token_ids" else None,
        messages=chat_from_wire(message.messages) if kind == "messages" else None,
        sampling=sampling_from_wire(message.sampling),
        margins=message.report_margins,
        rule=rule_from_wire(message.rule),
        drafts=check.member("drafts", message.drafts, DRAFTS, "value"),
        unset_sampling=frozenset(name for name in SAMPLING_FIELDS if not message.sampling.HasField(name)),
        **values,
    )


def chunk_to_wire(chunk: Chunk) -> pb.GenerateChunk:
    return pb.GenerateChunk(
        token_ids=chunk.token_ids, text=chunk.text, margins=chunk.margins, logprobs=logprobs_to_wire(chunk.logprobs)
    )


def chunk_from_wire(message: pb.GenerateChunk) -> Chunk:
    count = len(message.token_ids)
    for name in ("margins", "logprobs"):
        if given := len(getattr(message, name)):
            check.same_count(name, given, count, "tokens")
    logprobs = logprobs_from_wire(message.logprobs, check.MOST_TOKENS, MAX_LOGPROBS)
    ids = check.token_ids("token_ids", message.token_ids, check.MOST_TOKENS)
    return Chunk(ids, message.text, check.numbers("margins", message.margins), logprobs)


def completion_to_wire(completion: GenerationEnd) -> pb.GenerateCompletion:
    return pb.GenerateCompletion(
        finish_reason=pb.FinishReason.Name(completion.finish_reason.value),
        prompt_tokens=completion.prompt_tokens,
        output_tokens=completion.output_tokens,
        stats=pb.SpeculationStats(**{name: getattr(completion.stats, name) for name in _STATISTICS}),
        receipt=completion.receipt,
    )


def completion_from_wire(message: pb.GenerateCompletion) -> GenerationEnd:
    reasons = {reason: reason.value for reason in FinishReason}
    return GenerationEnd(
        finish_reason=check.member("finish_reason", message.finish_reason, reasons, "reason"),
        prompt_tokens=message.prompt_tokens,
        output_tokens=message.output_tokens,
        stats=_stats_from_wire(message.stats),
        receipt=message.receipt,
    )


def _statistics(kind: str) -> tuple[str, ...]:
    # All statistics but the placement cross the wire.
    return tuple(each.name for each in fields(SpeculationStats) if each.type == kind)


_COUNTS, _SECONDS = _statistics("int"), _statistics("float")
_LISTS, _BY_PROPOSER = _statistics("list[int]"), _statistics("dict[str, int]")
_DERIVED = ("wasted_drafts", "rounds_by_length", "acceptance_histogram")
_STATISTICS = (*_COUNTS, *_SECONDS, *_LISTS, *_BY_PROPOSER, *_DERIVED)


def _stats_from_wire(message: pb.SpeculationStats) -> SpeculationStats:
    values: dict[str, Any] = {name: getattr(message, name) for name in _COUNTS}
    values |= {name: check.seconds(name, getattr(message, name)) for name in _SECONDS}
    for name in (*_LISTS, *_BY_PROPOSER):
        check.count(name, len(getattr(message, name)), MOST_LISTED)
    values |= {name: list(getattr(message, name)) for name in _LISTS}
    values |= {name: dict(getattr(message, name)) for name in _BY_PROPOSER}
    return SpeculationStats(**values)


_INTEGERS = ("end_of_sequence_ids", "feature_layers")
_LISTED = (*_INTEGERS, "adapters", "rehearsals")
_INFO = tuple(each.name for each in fields(ModelInfo) if each.name not in _LISTED)
_REHEARSAL = tuple(each.name for each in fields(Rehearsal))
MOST_LISTED = 2**14  # entries of a list of a model or of statistics
_INFO_BOUNDS = (
    ("vocab_size", 1, check.MOST_TOKENS),
    ("max_sequence_length", 2, check.MOST_TOKENS),
    ("max_speculation_length", 0, MAX_DRAFTED),
    ("default_speculation_length", 0, MAX_DRAFTED),
    ("kv_slots", 0, check.MOST_ROWS),
    ("plain_width", 0, check.MOST_ROWS),
    ("feature_size", 0, check.MOST_ROWS),
    ("max_unread_tokens", 0, check.MOST_TOKENS),
)


def info_to_wire(info: ModelInfo) -> pb.ModelInfo:
    return pb.ModelInfo(
        **{name: getattr(info, name) for name in (*_INFO, *_INTEGERS)},
        adapters=[pb.Adapter(name=name, revision=revision) for name, revision in info.adapters],
        rehearsals=[pb.Rehearsal(**asdict(each)) for each in info.rehearsals],
    )


def info_from_wire(message: pb.ModelInfo) -> ModelInfo:
    # Strings go to logs and terminals: made printable.
    for name, least, most in _INFO_BOUNDS:
        check.count(name, getattr(message, name), most, least)
    check.seconds("startup_seconds", message.startup_seconds)
    for name in _LISTED:
        check.count(name, len(getattr(message, name)), MOST_LISTED)
    check.token_ids("end_of_sequence_ids", message.end_of_sequence_ids, message.vocab_size)
    for each in message.rehearsals:
        check.seconds("late_seconds", each.late_seconds)
    return ModelInfo(
        **printable_fields(message, _INFO),
        end_of_sequence_ids=tuple(message.end_of_sequence_ids),
        feature_layers=tuple(message.feature_layers),
        adapters=tuple((printable(each.name), printable(each.revision)) for each in message.adapters),
        rehearsals=tuple(Rehearsal(**printable_fields(each, _REHEARSAL)) for each in message.rehearsals),
    )


def printable_fields(message: Any, names: Sequence[str]) -> dict[str, Any]:
    values = ((name, getattr(message, name)) for name in names)
    return {name: printable(value) if isinstance(value, str) else value for name, value in values}


def texts_of(chat: pb.ChatMessages) -> str:
    check_counts([len(each.tool_calls) for each in chat.messages])
    texts = [(each.role, each.content, each.name, each.tool_call_id) for each in chat.messages]
    calls = [(call.id, call.name, call.arguments) for each in chat.messages for call in each.tool_calls]
    return "".join(text for some in (*texts, *calls) for text in some)


def chat_from_wire(chat: pb.ChatMessages) -> tuple[ChatMessage, ...]:
    check_counts([len(each.tool_calls) for each in chat.messages])
    return tuple(_message_from_wire(i, message) for i, message in enumerate(chat.messages))


def _message_from_wire(i: int, message: pb.ChatMessage) -> ChatMessage:
    try:
        calls = tuple(ToolCall(each.id, each.name, each.arguments) for each in message.tool_calls)
        return ChatMessage(message.role, message.content, message.name, calls, message.tool_call_id)
    except InvalidField as error:
        raise InvalidField(f"messages[{i}].{error.field}", error.fault) from None


_PENALTIES = ("presence_penalty", "frequency_penalty")
_KINDS = {
    StructureKind.JSON_SCHEMA: pb.STRUCTURE_KIND_JSON_SCHEMA,
    StructureKind.REGEX: pb.STRUCTURE_KIND_REGEX,
    StructureKind.CHOICE: pb.STRUCTURE_KIND_CHOICE,
    StructureKind.GRAMMAR: pb.STRUCTURE_KIND_GRAMMAR,
}


def sampling_to_wire(sampling: SamplingParams, unset_sampling: Set[str] = frozenset()) -> pb.Sampling:
    """Omits `unset_sampling` and logits processing without effect."""
    message = pb.Sampling(**{name: getattr(sampling, name) for name in SAMPLING_FIELDS if name not in unset_sampling})
    processed = sampling.processed
    if not processed:
        return message
    for name in _PENALTIES:
        if name in processed:
            setattr(message, name, getattr(sampling, name))
    for token, bias in sampling.logit_bias:
        message.logit_bias.token_ids.append(token)
        message.logit_bias.biases.append(bias)
    if sampling.structure:
        message.structure.kind = _KINDS[sampling.structure.kind]
        message.structure.text = sampling.structure.text
    return message


def sampling_from_wire(message: pb.Sampling) -> SamplingParams:
    values = {name: getattr(message, name) for name in (*SAMPLING_FIELDS, *_PENALTIES) if message.HasField(name)}
    if message.HasField("logit_bias"):
        values["logit_bias"] = _bias_from_wire(message.logit_bias)
    if message.HasField("structure"):
        kind = check.member("structure", message.structure.kind, _KINDS, "kind")
        values["structure"] = Structure(kind, message.structure.text)
    return SamplingParams(**values)


def _bias_from_wire(message: pb.LogitBias) -> tuple[tuple[int, float], ...]:
    tokens, biases = message.token_ids, message.biases
    for name, values in (("token_ids", tokens), ("biases", biases)):
        if len(values) > MAX_BIASES:
            raise InvalidField(f"logit_bias.{name}", f"{len(values)} are above the limit of {MAX_BIASES}")
    if len(tokens) != len(biases):
        raise InvalidField("logit_bias", f"{len(biases)} biases for {len(tokens)} token ids")
    return tuple(zip(tokens, biases, strict=True))


def logprobs_to_wire(logprobs: Sequence[TokenLogprobs]) -> list[pb.TokenLogprobs]:
    return [
        pb.TokenLogprobs(
            logprob=each.logprob,
            top_token_ids=[token for token, _ in each.top],
            top_logprobs=[logprob for _, logprob in each.top],
        )
        for each in logprobs
    ]


def logprobs_from_wire(messages: Sequence[pb.TokenLogprobs], vocab_size: int, top: int) -> tuple[TokenLogprobs, ...]:
    found = []
    for each in messages:
        count = check.count("logprobs.top_token_ids", len(each.top_token_ids), top)
        check.same_count("logprobs.top_logprobs", len(each.top_logprobs), count, "token ids")
        ids = check.token_ids("logprobs.top_token_ids", each.top_token_ids, vocab_size)
        own, *values = check.numbers("logprobs", [each.logprob, *each.top_logprobs])
        found.append(TokenLogprobs(own, tuple(zip(ids, values, strict=True))))
    return tuple(found)
