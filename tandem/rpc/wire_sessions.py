"""Converts openings, rounds, runs and verdicts to protobuf and back."""

from __future__ import annotations

from collections.abc import Sequence

from tandem.rpc import wire_checks as check
from tandem.rpc.received_errors import TandemError
from tandem.rpc.wire import (
    DRAFTS,
    RULES,
    logprobs_from_wire,
    logprobs_to_wire,
    rule_from_wire,
    rule_name,
    sampling_from_wire,
    sampling_to_wire,
)
from tandem.speculation.features import FeatureInbox, FeatureSpec
from tandem.speculation.rounds import OutOfStep, RoundsLost
from tandem.speculation.rules import known_prefix
from tandem.speculation.run_on import RunMessage
from tandem.speculation.types import (
    MAX_DRAFTED,
    Draft,
    InvalidField,
    ModelInfo,
    Proposer,
    Request,
    Rule,
    SparseDistribution,
    Verdict,
)
from tandem.v1 import draft_worker_pb2, generation_pb2
from tandem.v1 import target_verifier_pb2 as pb

MAX_SUPPORT = 1024  # tokens in a distribution; ours have 32 (speculation/rejection.py)
STEPS_TOGETHER = 32  # of a run, in one reply


def verdict_to_wire(verdict: Verdict, committed_length: int) -> pb.VerifyResponse:
    return pb.VerifyResponse(
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


def session_from_wire(message: pb.OpenSessionRequest, features: FeatureSpec | None, max_total_tokens: int) -> Request:
    return Request(
        sampling=sampling_from_wire(message.sampling),
        rule=rule_from_wire(message.rule),
        margins=message.report_margins,
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        adapter=message.adapter,
        features=features,
        max_total_tokens=max_total_tokens,
    )


def opening_to_wire(
    request: Request, prefix: Sequence[int], prompt_length: int, inbox: FeatureInbox | None, expected: ModelInfo | None
) -> pb.OpenSessionRequest:
    return pb.OpenSessionRequest(
        prefix=prefix,
        prompt_length=prompt_length,
        sampling=sampling_to_wire(request.sampling),
        rule=RULES[request.rule],
        report_margins=request.margins,
        logprobs=request.logprobs,
        weights_revision=expected.weights_revision if expected else "",
        dtype=expected.dtype if expected else "",
        vocab_size=expected.vocab_size if expected else 0,
        adapter=request.adapter,
        features=feature_request(inbox, len(prefix)),
        max_total_tokens=request.most_tokens(prompt_length),
    )


def check_applied(where: str, request: Request, reply: pb.OpenSessionResponse) -> None:
    """Raises TandemError unless the server `where` applies every field."""
    if reply.rule != RULES[request.rule] and (reply.rule or request.rule is not Rule.AGREEMENT):
        raise TandemError(
            "FAILED_PRECONDITION",
            f"rule: {where} does not verify by {request.rule.value}, as requested; it reports {rule_name(reply.rule)}",
        )
    lacking = [name for name in request.sampling.processed if name not in reply.processed_fields]
    if request.adapter and not reply.adapter_revision:
        lacking.append("adapter")
    if lacking:
        raise TandemError("FAILED_PRECONDITION", f"{lacking[0]}: {where} does not apply it")


def check_opened(
    asked: pb.OpenSessionRequest, reply: pb.OpenSessionResponse, info: ModelInfo | None, features: FeatureSpec | None
) -> None:
    """Checks the reply to an opening; `features`: those requested. Raises InvalidField."""
    known = len(asked.prefix)
    check.count("committed_length", reply.committed_length, known + _limits(info)[1] + 1, known)
    check.count("reused_length", reply.reused_length, reply.committed_length)
    check.count("max_unread_tokens", reply.max_unread_tokens, check.MOST_TOKENS)
    check.count("adapter_revision", len(reply.adapter_revision), check.MOST_NAME)
    for name in ("lease_seconds", "queue_seconds", "prefill_seconds"):
        check.seconds(name, getattr(reply, name))
    if features and reply.HasField("features"):
        first = min(asked.features.start, known - 1)
        start = check.count("features.start", reply.features.start, known - 1, first)
        size = (known - 1 - start) * features.position_bytes
        check.same_count("features.values", len(reply.features.values), size, f"bytes from position {start} on")


def _limits(info: ModelInfo | None) -> tuple[int, int]:
    """Returns the vocabulary's size and the most draft tokens of a step."""
    return (info.vocab_size, info.max_speculation_length) if info else (check.MOST_TOKENS, check.MOST_ROWS)


def answer_from_wire(
    reply: pb.VerifyResponse, asked: pb.VerifyRequest, request: Request, info: ModelInfo | None, seconds: float
) -> Verdict:
    """Converts a reply after `seconds`; a replay's draft may differ. Raises RoundsLost if stale, and InvalidField."""
    network_seconds = seconds - check.seconds("server_seconds", reply.server_seconds, seconds)
    if reply.stale:
        held = check.count("committed_length", reply.committed_length, check.MOST_TOKENS)
        raise RoundsLost(OutOfStep(f"a round at {asked.base_length} is stale: the verifier holds {held} tokens"))
    draft, same = asked.draft_tokens, 0
    while same < min(len(draft), len(reply.token_ids)) and draft[same] == reply.token_ids[same]:
        same += 1
    if not reply.replayed:
        if reply.accepted > len(draft):
            raise InvalidField("accepted", f"{reply.accepted} of {len(draft)} drafts")
        if reply.accepted > same:
            raise InvalidField("token_ids", f"the id at {same} is not the draft's, and {reply.accepted} were accepted")
    verdict = _verdict(reply, asked.base_length, min(reply.accepted, same), request, info, seconds)
    check.count("next_steps", len(reply.next_steps), 0)
    verdict.network_seconds = network_seconds
    return verdict


def run_step_from_wire(
    reply: pb.VerifyResponse,
    base_length: int,
    request: Request,
    info: ModelInfo | None,
    seconds: float,
    rtt: float | None,
) -> Verdict:
    """Converts a run's reply after `base_length` tokens; a replay may have been no step. Raises InvalidField."""
    drafted = check.count("drafted", reply.drafted, _limits(info)[1])
    if reply.replayed:
        drafted = max(drafted, reply.accepted)
    if reply.accepted > drafted:
        raise InvalidField("accepted", f"{reply.accepted} of {drafted} drafts")
    verdict = _verdict(reply, base_length, reply.accepted, request, info, seconds)
    verdict.network_seconds, verdict.drafted, verdict.copied = rtt, drafted, reply.copied
    return verdict


def _verdict(
    reply: pb.VerifyResponse, base_length: int, accepted: int, request: Request, info: ModelInfo | None, seconds: float
) -> Verdict:
    count, (vocab_size, most_drafts) = len(reply.token_ids), _limits(info)
    check.count("accepted", reply.accepted, most_drafts)
    if count != reply.accepted + 1:
        raise InvalidField("token_ids", f"{count} with {reply.accepted} accepted drafts")
    if reply.committed_length != base_length + count:
        raise InvalidField("committed_length", f"{reply.committed_length} after {base_length} tokens and {count} more")
    if not (request.margins and request.rule is Rule.REJECTION and not reply.margins):
        check.same_count("margins", len(reply.margins), count if request.margins else 0, "tokens")
    check.same_count("logprobs", len(reply.logprobs), 0 if request.logprobs is None else count, "tokens")
    each = request.features.position_bytes if request.features else 0
    check.same_count("features", len(reply.features), each * count, f"bytes of {count} positions")
    return Verdict(
        check.token_ids("token_ids", reply.token_ids, vocab_size),
        accepted,
        check.seconds("queue_seconds", reply.queue_seconds, seconds),
        check.seconds("compute_seconds", reply.compute_seconds, seconds),
        check.numbers("margins", reply.margins),
        max(1, check.count("step_rows", reply.step_rows, check.MOST_ROWS)),
        check.count("step_width", reply.step_width, check.MOST_ROWS),
        check.count("step_tokens", reply.step_tokens, check.MOST_TOKENS),
        logprobs_from_wire(reply.logprobs, vocab_size, request.logprobs or 0),
    )


def feature_request(inbox: FeatureInbox | None, prefix_length: int) -> pb.FeatureRequest | None:
    """Returns the request for the prefix's features; None without an inbox."""
    if inbox is None:
        return None
    spec = inbox.spec
    number_format = generation_pb2.FEATURE_FORMAT_BFLOAT16
    return pb.FeatureRequest(layers=spec.layers, format=number_format, start=inbox.wanted(prefix_length))


def run_message_to_wire(message: RunMessage, request: pb.VerifyRequest) -> pb.VerifyRequest:
    request.base_length, request.last_token = message.base_length, message.last_token
    request.draft_tokens.extend(message.token_ids)
    request.run_until, request.max_step_drafts = message.run_until, message.most_drafts
    request.max_step_copies = message.most_copies
    return request


def run_message_from_wire(request: pb.VerifyRequest, most: int) -> RunMessage:
    """Raises InvalidField; token ids are unchecked. `most`: draft tokens per step."""
    if len(request.draft_tokens) > MAX_DRAFTED:
        raise InvalidField("draft_tokens", f"{len(request.draft_tokens)} tokens are above {MAX_DRAFTED}")
    draft, width = tuple(request.draft_tokens), min(request.max_step_drafts, most)
    copies = min(request.max_step_copies, most)
    return RunMessage(request.base_length, request.last_token, draft, request.run_until, width, copies)


def steps_from_wire(reply: pb.VerifyResponse) -> list[pb.VerifyResponse]:
    """Returns a reply's steps, oldest first. Raises InvalidField; fields are unchecked."""
    if len(reply.next_steps) >= STEPS_TOGETHER:
        raise InvalidField("next_steps", f"{len(reply.next_steps)} are above {STEPS_TOGETHER - 1}")
    if any(step.next_steps for step in reply.next_steps):
        raise InvalidField("next_steps", "one of them has next_steps of its own")
    return [reply, *reply.next_steps]


def drafted_in(request: pb.VerifyRequest, reply: pb.VerifyResponse) -> int:
    """Returns how many draft tokens a step verified. `request`: the newest message of a run."""
    return int(reply.drafted) if request.HasField("run_until") else len(request.draft_tokens)


def distributions_to_wire(distributions: Sequence[SparseDistribution]) -> list[generation_pb2.SparseDistribution]:
    return [generation_pb2.SparseDistribution(token_ids=each.token_ids, weights=each.weights) for each in distributions]


def distributions_from_wire(
    messages: Sequence[generation_pb2.SparseDistribution], draft: Sequence[int]
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


def draft_to_wire(draft: Draft) -> draft_worker_pb2.ProposeResponse:
    return draft_worker_pb2.ProposeResponse(
        draft_tokens=draft.token_ids,
        proposed_by=[proposer.value for proposer in draft.proposed_by],
        distributions=distributions_to_wire(draft.distributions),
        queue_seconds=draft.queue_seconds,
        compute_seconds=draft.compute_seconds,
        step_rows=draft.rows,
        doubted=draft.doubted,
    )


def draft_from_wire(
    reply: draft_worker_pb2.ProposeResponse, worker_vocab_size: int, vocab_size: int, k: int, rule: Rule, seconds: float
) -> Draft:
    """Returns a draft of up to `k` tokens, `seconds` after its request.

    Ids beyond `vocab_size` end the draft; in distributions they are invalid: cutting these would bias the output.
    """
    if len(reply.draft_tokens) > k:
        raise InvalidField("draft_tokens", f"{len(reply.draft_tokens)} where at most {k} were asked for")
    if reply.doubted and not 0 < len(reply.draft_tokens) < k:
        raise InvalidField("doubted", f"of a draft of {len(reply.draft_tokens)} tokens where {k} were asked for")
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
        doubted=reply.doubted,
    )


def proposing_to_wire(request: Request, message: draft_worker_pb2.ProposeRequest) -> None:
    message.sampling.CopyFrom(sampling_to_wire(request.sampling))
    message.rule, message.drafts = RULES[request.rule], DRAFTS[request.drafts]


def proposing_from_wire(message: draft_worker_pb2.ProposeRequest) -> Request:
    if not message.HasField("sampling"):
        raise InvalidField("sampling", "missing: a session's first message must have it")
    return Request(
        sampling=sampling_from_wire(message.sampling),
        rule=rule_from_wire(message.rule),
        drafts=check.member("drafts", message.drafts, DRAFTS, "value"),
    )


def proposers_from_wire(names: Sequence[str], count: int) -> tuple[Proposer, ...]:
    # Unknown drafters of newer workers count as models.
    known = {Proposer.NGRAM.value: Proposer.NGRAM}
    found = tuple(known.get(name, Proposer.MODEL) for name in names[:count])
    return found if len(found) == count else (Proposer.MODEL,) * count
