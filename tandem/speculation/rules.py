"""Applies a request's verification rule to logits. At temperature 0 or k = 0 both rules are agreement."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from tandem.speculation import rejection
from tandem.speculation.draws import BadLogits, best_token, draw, largest, margin
from tandem.speculation.elementary import exp, log, total
from tandem.speculation.processing import Processor
from tandem.speculation.rejection import Logits
from tandem.speculation.types import Request, SamplingParams, SparseDistribution, TokenLogprobs, Verdict

# `all_logprobs`, or a runner's faster one for all its rows
LogprobsOf = Callable[[Sequence[Logits], Sequence[int], int], tuple[TokenLogprobs, ...]]


def all_logprobs(logits: Sequence[Logits], tokens: Sequence[int], top: int) -> tuple[TokenLogprobs, ...]:
    return tuple(token_logprobs(row, token, top) for row, token in zip(logits, tokens, strict=True))


def token_logprobs(logits: Logits, token: int, top: int) -> TokenLogprobs:
    """Returns log-softmax of logits, float32 [vocabulary], at `token` and the `top` largest; its sum has one order."""
    most = float(logits.max())
    ids = largest(logits, min(top, len(logits))).tolist() if top else []
    return reported(logits, token, ids, most + float(log(total(exp(logits.astype(np.float64) - most)))))


def reported(logits: Logits, token: int, ids: Iterable[int], log_total: float) -> TokenLogprobs:
    """Returns log-probabilities of `token` and `ids`, given log(sum(exp(logits)))."""
    return TokenLogprobs(
        float(logits[token]) - log_total, tuple((each, float(logits[each]) - log_total) for each in ids)
    )


def settled(best: int, params: SamplingParams, processor: Processor | None, draft: Sequence[int]) -> bool:
    """Returns whether `best`, the id of the largest raw logit (-1: not finite), is the next token."""
    return best >= 0 and params.greedy and (processor is None or processor.keeps(best, draft))


def draft_token(
    logits: Logits,
    request: Request,
    position: int,
    target_vocab_size: int | None = None,
    processor: Processor | None = None,
    drafted: Sequence[int] = (),
) -> tuple[int, SparseDistribution | None]:
    """Draws a draft token after `drafted`; returns it with its q, if the verifier needs that."""
    params = request.sampling
    try:
        if params.greedy and settled(best := best_token(logits), params, processor, drafted):
            return best, None
        if processor:
            logits = processor.logits(logits, drafted)
    except BadLogits:
        logits = np.full_like(logits, -np.inf)  # a draft may be wrong about anything
    if request.drafts_sample:
        return rejection.draft_token(logits, params, position, target_vocab_size)
    try:
        return draw(logits, params, position), None
    except BadLogits:
        return 0, None


def verify_draft(
    draft: Sequence[int],
    sent: Sequence[SparseDistribution],
    logits: Callable[[int], Logits],
    request: Request,
    start: int,
    processor: Processor | None = None,
    logprobs_of: LogprobsOf = all_logprobs,
    best: Callable[[int], int] | None = None,
) -> Verdict:
    """Returns what a round commits, by logits(i) after draft[:i] and their best(i). Raises BadLogits."""
    params = request.sampling
    best = best or (lambda i: best_token(logits(i)))

    def processed(i: int) -> Logits:
        return logits(i) if processor is None else processor.logits(logits(i), draft[:i])

    def drawn(i: int) -> int:
        if params.greedy and settled(token := best(i), params, processor, draft[:i]):
            return token
        return draw(processed(i), params, start + i)

    if draft and request.drafts_sample:
        verdict = rejection.reject_seeded(draft, sent, processed, params, start)
    else:
        verdict = agree(draft, drawn)
        if request.margins:
            verdict.margins = tuple(margin(processed(i), params, start + i) for i in range(len(verdict.token_ids)))
    if request.logprobs is not None:
        tokens = verdict.token_ids
        verdict.logprobs = logprobs_of([logits(i) for i in range(len(tokens))], tokens, request.logprobs)
    return verdict


def agree(draft: Sequence[int], target_draw: Callable[[int], int]) -> Verdict:
    """Commits draws i = 0, 1, ... of the target after draft[:i] while they equal draft[i], then one more."""
    drawn: list[int] = []
    for i in range(len(draft) + 1):
        drawn.append(target_draw(i))
        if i == len(draft) or drawn[i] != draft[i]:
            break
    return Verdict(token_ids=tuple(drawn), accepted=len(drawn) - 1)


def known_prefix(draft: Sequence[int], vocab_size: int) -> tuple[int, ...]:
    """Returns the draft before its first token outside the target's vocabulary."""
    cut = next((i for i, token in enumerate(draft) if token >= vocab_size), len(draft))
    return tuple(draft[:cut])
