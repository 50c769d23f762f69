"""Converts domain data to protobuf and back; `..._from_wire` raise InvalidField naming the field."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any

from tandem.rpc import wire_checks as check
from tandem.rpc.printable import printable
from tandem.rpc.wire_chat import chat_from_wire, chat_to_wire
from tandem.rpc.wire_sampling import logprobs_from_wire, logprobs_to_wire
from tandem.rpc.wire_sampling import sampling_from_wire as sampling_from_wire
from tandem.rpc.wire_sampling import sampling_to_wire as sampling_to_wire
from tandem.speculation.request import Drafts
from tandem.speculation.rules import known_prefix
from tandem.speculation.types import (
    MAX_DRAFTED,
    MAX_LOGPROBS,
    SAMPLING_FIELDS,
    Chunk,
    Draft,
    FinishReason,
    GenerationEnd,
    GenerationRequest,
    InvalidField,
    ModelInfo,
    Proposer,
    Rehearsal,
    Request,
    Rule,
    SparseDistribution,
    SpeculationStats,
)
from tandem.v1 import draft_worker_pb2 as worker_pb
from tandem.v1 import generation_pb2 as pb

_RULES = {
    Rule.AGREEMENT: pb.VERIFICATION_RULE_AGREEMENT,
    Rule.REJECTION: pb.VERIFICATION_RULE_REJECTION,
}


def rule_to_wire(rule: Rule) -> pb.VerificationRule:
    return _RULES[rule]


def rule_from_wire(value: int) -> Rule:
    if value == pb.VERIFICATION_RULE_UNSPECIFIED:
        return Rule.AGREEMENT
    return check.member("rule", value, _RULES, "verification rule")


def rule_name(value: int) -> str:
    # A message may name an unknown rule.
    names = {int(known): rule.value for rule, known in _RULES.items()}
    return names.get(value, str(value) if value else "nothing")


_DRAFTS = {
    Drafts.AUTO: pb.DRAFTS_UNSPECIFIED,
    Drafts.NONE: pb.DRAFTS_NONE,
    Drafts.LOOKUP: pb.DRAFTS_LOOKUP,
    Drafts.MODEL: pb.DRAFTS_MODEL,
    Drafts.HEAD: pb.DRAFTS_HEAD,
}


def drafts_from_wire(value: int) -> Drafts:
    return check.member("drafts", value, _DRAFTS, "value")


MAX_SUPPORT = 1024  # tokens in a distribution; ours have 32 (speculation/rejection.py)


def distributions_to_wire(distributions: Sequence[SparseDistribution]) -> list[pb.SparseDistribution]:
    return [pb.SparseDistribution(token_ids=each.token_ids, weights=each.weights) for each in distributions]


def distributions_from_wire(
    messages: Sequence[pb.SparseDistribution], draft: Sequence[int]
) -> tuple[SparseDistribution, ...]:
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
            raise InvalidField(f"distributions[{i}].{error.field}", error.fault) from None
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


def draft_from_wire(
    reply: worker_pb.ProposeResponse, worker_vocab_size: int, vocab_size: int, k: int, rule: Rule, seconds: float
) -> Draft:
    """Returns a draft of up to `k` tokens, `seconds` after its request.

    A worker's vocabulary may be larger: ids of `vocab_size` and above end the draft, but are invalid in distributions,
    where truncation would bias the output.
    """
    if len(reply.draft_tokens) > k:
        raise InvalidField("draft_tokens", f"{len(reply.draft_tokens)} where at most {k} were asked for")
    if rule is Rule.AGREEMENT:
        check.same_count("distributions", len(reply.distributions), 0, "tokens that are verified by agreement")
    drafted = known_prefix(check.token_ids("draft_tokens", reply.draft_tokens, worker_vocab_size), vocab_size)
    distributions = distributions_from_wire(reply.distributions, reply.draft_tokens)
    if any(token >= vocab_size for each in distributions for token in each.token_ids):
        raise InvalidField("distributions", f"a token is outside the vocabulary of {vocab_size}")
    return Draft(
        drafted,
        check.seconds("queue_seconds", reply.queue_seconds, seconds),
        check.seconds("compute_seconds", reply.compute_seconds, seconds),
        proposers_from_wire(reply.proposed_by, len(drafted)),
        distributions[: len(drafted)],
        max(1, check.count("step_rows", reply.step_rows, check.MOST_ROWS)),
    )


def proposing_to_wire(request: Request, message: worker_pb.ProposeRequest) -> None:
    message.sampling.CopyFrom(sampling_to_wire(request.sampling))
    message.rule, message.drafts = rule_to_wire(request.rule), _DRAFTS[request.drafts]


def proposing_from_wire(message: worker_pb.ProposeRequest) -> Request:
    if not message.HasField("sampling"):
        raise InvalidField("sampling", "missing: a session's first message must have it")
    return Request(
        sampling=sampling_from_wire(message.sampling),
        rule=rule_from_wire(message.rule),
        drafts=drafts_from_wire(message.drafts),
    )


def proposers_from_wire(names: Sequence[str], count: int) -> tuple[Proposer, ...]:
    # Unknown drafters of newer workers count as models.
    known = {Proposer.NGRAM.value: Proposer.NGRAM}
    found = tuple(known.get(name, Proposer.MODEL) for name in names[:count])
    return found if len(found) == count else (Proposer.MODEL,) * count


def generation_to_wire(request: GenerationRequest) -> pb.Generation:
    message = pb.Generation(
        chat=request.chat,
        sampling=sampling_to_wire(request.sampling, request.unset_sampling),
        max_new_tokens=request.max_new_tokens,
        speculation_length=request.speculation_length,
        stop_token_ids=request.stop_token_ids,
        stop_strings=request.stop_strings,
        ignore_end_of_sequence=request.ignore_end_of_sequence,
        report_margins=request.margins,
        max_total_tokens=request.max_total_tokens,
        rule=rule_to_wire(request.rule),
        logprobs=request.logprobs,
        adapter=request.adapter,
        drafts=_DRAFTS[request.drafts],
        receipt=request.receipt,
        prediction=request.prediction,
    )
    if request.messages is not None:
        message.messages.CopyFrom(chat_to_wire(request.messages))
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
    optional = ("max_new_tokens", "speculation_length", "max_total_tokens", "logprobs")
    return GenerationRequest(
        text=message.text if kind == "text" else None,
        token_ids=tuple(message.token_ids.ids) if kind == "token_ids" else None,
        messages=chat_from_wire(message.messages) if kind == "messages" else None,
        chat=message.chat,
        sampling=sampling_from_wire(message.sampling),
        stop_token_ids=tuple(message.stop_token_ids),
        stop_strings=tuple(message.stop_strings),
        ignore_end_of_sequence=message.ignore_end_of_sequence,
        margins=message.report_margins,
        rule=rule_from_wire(message.rule),
        adapter=message.adapter,
        drafts=drafts_from_wire(message.drafts),
        receipt=message.receipt,
        prediction=message.prediction,
        unset_sampling=frozenset(name for name in SAMPLING_FIELDS if not message.sampling.HasField(name)),
        **{name: getattr(message, name) for name in optional if message.HasField(name)},
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
        stats=_stats_to_wire(completion.stats),
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


def _stats_to_wire(stats: SpeculationStats) -> pb.SpeculationStats:
    values = {name: getattr(stats, name) for name in (*_COUNTS, *_SECONDS, *_LISTS, *_BY_PROPOSER, *_DERIVED)}
    return pb.SpeculationStats(**values)


def _stats_from_wire(message: pb.SpeculationStats) -> SpeculationStats:
    values: dict[str, Any] = {name: getattr(message, name) for name in _COUNTS}
    values |= {name: check.seconds(name, getattr(message, name)) for name in _SECONDS}
    for name in (*_LISTS, *_BY_PROPOSER):
        check.count(name, len(getattr(message, name)), MOST_LISTED)
    values |= {name: list(getattr(message, name)) for name in _LISTS}
    values |= {name: dict(getattr(message, name)) for name in _BY_PROPOSER}
    return SpeculationStats(**values)


_LISTED = ("end_of_sequence_ids", "adapters", "feature_layers", "rehearsals")
_INFO = tuple(each.name for each in fields(ModelInfo) if each.name not in _LISTED)
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
    values = {name: getattr(info, name) for name in _INFO}
    adapters = [pb.Adapter(name=name, revision=revision) for name, revision in info.adapters]
    return pb.ModelInfo(
        **values,
        end_of_sequence_ids=info.end_of_sequence_ids,
        adapters=adapters,
        feature_layers=info.feature_layers,
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
        rehearsals=tuple(_rehearsal_from_wire(each) for each in message.rehearsals),
    )


def _rehearsal_from_wire(message: pb.Rehearsal) -> Rehearsal:
    return Rehearsal(
        printable(message.part),
        printable(message.name),
        printable(message.device),
        printable(message.source),
        message.steps,
        message.late_steps,
        check.seconds("late_seconds", message.late_seconds),
    )
