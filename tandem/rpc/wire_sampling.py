"""Converts sampling parameters and log-probabilities to protobuf and back."""

from __future__ import annotations

from collections.abc import Sequence, Set

from tandem.rpc import wire_checks as check
from tandem.speculation.sampling import MAX_BIASES
from tandem.speculation.types import (
    SAMPLING_FIELDS,
    InvalidField,
    SamplingParams,
    Structure,
    StructureKind,
    TokenLogprobs,
)
from tandem.v1 import generation_pb2 as pb

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
