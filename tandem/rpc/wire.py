"""Converts domain data to protobuf messages and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tandem.rpc.printable import printable
from tandem.rpc.wire_sampling import logprobs_from_wire, logprobs_to_wire
from tandem.rpc.wire_sampling import sampling_from_wire as sampling_from_wire
from tandem.rpc.wire_sampling import sampling_to_wire as sampling_to_wire
from tandem.speculation.acceptance import known_prefix
from tandem.speculation.pipeline import Answer
from tandem.speculation.types import (
    SAMPLING_FIELDS,
    Chunk,
    Draft,
    FinishReason,
    GenerationEnd,
    GenerationRequest,
    InvalidField,
    ModelInfo,
    Proposer,
    Rule,
    SparseDistribution,
    SpeculationStats,
    Verdict,
)
from tandem.v1 import draft_worker_pb2 as worker_pb
from tandem.v1 import generation_pb2 as pb
from tandem.v1 import target_verifier_pb2 as verifier_pb

_RULES = {
    Rule.AGREEMENT: pb.VERIFICATION_RULE_AGREEMENT,
    Rule.REJECTION: pb.VERIFICATION_RULE_REJECTION,
}


def rule_to_wire(rule: Rule) -> pb.VerificationRule:
    return _RULES[rule]


def rule_from_wire(value: int) -> Rule:
    """Converts a rule; unspecified means agreement, the default. Raises InvalidField."""
    if value == pb.VERIFICATION_RULE_UNSPECIFIED:
        return Rule.AGREEMENT
    for rule, known in _RULES.items():
        if value == known:
            return rule
    raise InvalidField("rule", f"{value} is not a known verification rule")


def rule_name(value: int) -> str:
    """Returns a rule's name for messages, even if it is unknown."""
    names = {int(known): rule.value for rule, known in _RULES.items()}
    return names.get(value, str(value) if value else "nothing")


MAX_SUPPORT = 1024
"""Most tokens in one distribution. Ours have 32 (tandem/speculation/rejection.py)."""


def distributions_to_wire(distributions: Sequence[SparseDistribution]) -> list[pb.SparseDistribution]:
    return [pb.SparseDistribution(token_ids=each.token_ids, weights=each.weights) for each in distributions]


def distributions_from_wire(
    messages: Sequence[pb.SparseDistribution], draft: Sequence[int]
) -> tuple[SparseDistribution, ...]:
    """Returns the distribution of each token of `draft`, or none at all. Raises InvalidField naming the field."""
    if messages and len(messages) != len(draft):
        raise InvalidField(
            "distributions", f"{len(messages)} for {len(draft)} draft tokens: give one for each, or none at all"
        )
    distributions = []
    for i, (message, token) in enumerate(zip(messages, draft, strict=False)):
        for name in ("token_ids", "weights"):
            if (given := len(getattr(message, name))) > MAX_SUPPORT:
                raise InvalidField(f"distributions[{i}].{name}", f"{given} are above the limit of {MAX_SUPPORT}")
        try:
            distributions.append(SparseDistribution(tuple(message.token_ids), tuple(message.weights)))
        except InvalidField as error:
            raise InvalidField(f"distributions[{i}].{error.field}", error.reason) from None
        if token not in message.token_ids:
            raise InvalidField("draft_tokens", f"token {token} at {i} is not in the support of distributions[{i}]")
    return tuple(distributions)


def draft_to_wire(draft: Draft) -> worker_pb.ProposeResponse:
    return worker_pb.ProposeResponse(
        draft_tokens=draft.token_ids,
        proposed_by=[proposer.value for proposer in draft.proposed_by],
        distributions=distributions_to_wire(draft.distributions),
        queue_seconds=draft.queue_seconds,
        compute_seconds=draft.compute_seconds,
        step_rows=draft.rows,
    )


def draft_from_wire(reply: worker_pb.ProposeResponse, vocab_size: int, k: int) -> Draft:
    """Returns up to `k` tokens within the vocabulary. Raises InvalidField naming the field.

    A distribution with tokens outside the vocabulary is invalid: truncating it would bias the output.
    """
    drafted = known_prefix(reply.draft_tokens, vocab_size)[:k]
    distributions = distributions_from_wire(reply.distributions, reply.draft_tokens)
    if any(token >= vocab_size for each in distributions for token in each.token_ids):
        raise InvalidField("distributions", f"a token is outside the vocabulary of {vocab_size}")
    return Draft(
        drafted,
        reply.queue_seconds,
        reply.compute_seconds,
        proposers_from_wire(reply.proposed_by, len(drafted)),
        distributions[: len(drafted)],
        max(1, reply.step_rows),
    )


def proposers_from_wire(names: Sequence[str], count: int) -> tuple[Proposer, ...]:
    """Returns the proposers of `count` draft tokens. Unknown drafters of newer workers count as models."""
    known = {Proposer.NGRAM.value: Proposer.NGRAM}
    found = tuple(known.get(name, Proposer.MODEL) for name in names[:count])
    return found if len(found) == count else (Proposer.MODEL,) * count


def verdict_to_wire(verdict: Verdict, committed_length: int) -> verifier_pb.VerifyResponse:
    """Builds the reply to a round after which `committed_length` tokens are committed."""
    return verifier_pb.VerifyResponse(
        committed_length=committed_length,
        token_ids=verdict.token_ids,
        accepted=verdict.accepted,
        queue_seconds=verdict.queue_seconds,
        compute_seconds=verdict.compute_seconds,
        margins=verdict.margins,
        step_rows=verdict.rows,
        step_width=verdict.width,
        step_tokens=verdict.step_tokens,
        logprobs=logprobs_to_wire(verdict.logprobs),
        features=verdict.features,
    )


def logprobs_asked(request: verifier_pb.VerifyRequest) -> int | None:
    """Returns how many likeliest tokens a round reports, or None if it reports no log-probabilities."""
    return request.logprobs if request.HasField("logprobs") else None


def answer_from_wire(reply: verifier_pb.VerifyResponse, seconds: float) -> Answer:
    """Converts the reply to a round that took `seconds`."""
    verdict = Verdict(
        tuple(reply.token_ids),
        reply.accepted,
        reply.queue_seconds,
        reply.compute_seconds,
        tuple(reply.margins),
        max(1, reply.step_rows),
        reply.step_width,
        reply.step_tokens,
        logprobs_from_wire(reply.logprobs),
    )
    network_seconds = max(0.0, seconds - reply.server_seconds)
    return Answer(None if reply.stale else verdict, reply.committed_length, network_seconds)


def generation_to_wire(request: GenerationRequest) -> pb.Generation:
    message = pb.Generation(
        chat=request.chat,
        sampling=sampling_to_wire(request.sampling, request.unset_sampling),
        max_new_tokens=request.max_new_tokens,
        speculation_length=request.speculation_length,
        stop_token_ids=request.stop_token_ids,
        stop_strings=request.stop_strings,
        ignore_end_of_sequence=request.ignore_end_of_sequence,
        report_margins=request.report_margins,
        max_total_tokens=request.max_total_tokens,
        rule=rule_to_wire(request.rule),
        logprobs=request.logprobs,
        adapter=request.adapter,
    )
    if request.token_ids is not None:
        message.token_ids.ids.extend(request.token_ids)
        message.token_ids.SetInParent()
    else:
        message.text = request.text or ""
    return message


def generation_from_wire(message: pb.Generation) -> GenerationRequest:
    """Raises InvalidField naming the field."""
    kind = message.WhichOneof("prompt")
    if kind is None:
        raise InvalidField("prompt", "missing: give text or token_ids")
    optional = ("max_new_tokens", "speculation_length", "max_total_tokens", "logprobs")
    return GenerationRequest(
        text=message.text if kind == "text" else None,
        token_ids=tuple(message.token_ids.ids) if kind == "token_ids" else None,
        chat=message.chat,
        sampling=sampling_from_wire(message.sampling),
        stop_token_ids=tuple(message.stop_token_ids),
        stop_strings=tuple(message.stop_strings),
        ignore_end_of_sequence=message.ignore_end_of_sequence,
        report_margins=message.report_margins,
        rule=rule_from_wire(message.rule),
        adapter=message.adapter,
        unset_sampling=frozenset(name for name in SAMPLING_FIELDS if not message.sampling.HasField(name)),
        **{name: getattr(message, name) for name in optional if message.HasField(name)},
    )


def chunk_to_wire(chunk: Chunk) -> pb.GenerateChunk:
    return pb.GenerateChunk(
        token_ids=chunk.token_ids, text=chunk.text, margins=chunk.margins, logprobs=logprobs_to_wire(chunk.logprobs)
    )


def chunk_from_wire(message: pb.GenerateChunk) -> Chunk:
    logprobs = logprobs_from_wire(message.logprobs)
    return Chunk(tuple(message.token_ids), message.text, tuple(message.margins), logprobs)


def completion_to_wire(completion: GenerationEnd) -> pb.GenerateCompletion:
    return pb.GenerateCompletion(
        finish_reason=pb.FinishReason.Name(completion.finish_reason.value),
        prompt_tokens=completion.prompt_tokens,
        output_tokens=completion.output_tokens,
        stats=_stats_to_wire(completion.stats),
    )


def completion_from_wire(message: pb.GenerateCompletion) -> GenerationEnd:
    return GenerationEnd(
        finish_reason=FinishReason(message.finish_reason),
        prompt_tokens=message.prompt_tokens,
        output_tokens=message.output_tokens,
        stats=_stats_from_wire(message.stats),
    )


_COUNTS = (
    "rounds",
    "drafted",
    "accepted",
    "bytes_up",
    "bytes_down",
    "stale_rounds",
    "stale_drafts",
    "guessed_rounds",
    "undrafted_rounds",
    "run_steps",
    "wasted_steps",
    "cached_prompt_tokens",
    "feature_bytes",
)
_SECONDS = ("draft_seconds", "verify_seconds", "queue_seconds", "network_seconds", "prefill_seconds")
_LISTS = ("accepted_per_position", "drafted_per_position", "sent_by_depth")
_BY_PROPOSER = ("drafted_by", "accepted_by")
_DERIVED = ("wasted_drafts", "rounds_by_length")


def _stats_to_wire(stats: SpeculationStats) -> pb.SpeculationStats:
    values = {name: getattr(stats, name) for name in (*_COUNTS, *_SECONDS, *_LISTS, *_BY_PROPOSER, *_DERIVED)}
    return pb.SpeculationStats(**values)


def _stats_from_wire(message: pb.SpeculationStats) -> SpeculationStats:
    values: dict[str, Any] = {name: getattr(message, name) for name in (*_COUNTS, *_SECONDS)}
    values |= {name: list(getattr(message, name)) for name in _LISTS}
    values |= {name: dict(getattr(message, name)) for name in _BY_PROPOSER}
    return SpeculationStats(**values)


_INFO = (
    "model_name",
    "weights_revision",
    "tokenizer_sha256",
    "vocab_size",
    "max_sequence_length",
    "max_speculation_length",
    "kv_slots",
    "dtype",
    "device",
    "backend",
    "draft_name",
    "default_speculation_length",
    "adaptive_speculation_length",
    "plain_width",
    "bit_exact",
    "startup_seconds",
    "feature_size",
)


def info_to_wire(info: ModelInfo) -> pb.ModelInfo:
    values = {name: getattr(info, name) for name in _INFO}
    adapters = [pb.Adapter(name=name, revision=revision) for name, revision in info.adapters]
    return pb.ModelInfo(
        **values,
        end_of_sequence_ids=info.end_of_sequence_ids,
        adapters=adapters,
        feature_layers=info.feature_layers,
    )


def info_from_wire(message: pb.ModelInfo) -> ModelInfo:
    """Makes the strings printable, since they go to logs and terminals."""
    given: dict[str, Any] = {name: getattr(message, name) for name in _INFO}
    values: dict[str, Any] = {
        name: printable(value) if isinstance(value, str) else value for name, value in given.items()
    }
    adapters = tuple((printable(each.name), printable(each.revision)) for each in message.adapters)
    return ModelInfo(
        **values,
        end_of_sequence_ids=tuple(message.end_of_sequence_ids),
        adapters=adapters,
        feature_layers=tuple(message.feature_layers),
    )
