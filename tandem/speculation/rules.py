"""Applies a request's verification rule to logits. At temperature 0 or k = 0 both rules are agreement."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from tandem.speculation import rejection
from tandem.speculation.acceptance import agree
from tandem.speculation.draws import BadLogits, Drawn, best_token, draw, greedy_token
from tandem.speculation.logprobs import LogprobsOf, all_logprobs
from tandem.speculation.processing import Processor
from tandem.speculation.rejection import Logits
from tandem.speculation.types import Request, SamplingParams, SparseDistribution, Verdict


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
        return draw(logits, params, position).token, None
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

    def drawn(i: int) -> Drawn:
        if params.greedy and not request.margins:
            token = best(i)
            return Drawn(token if settled(token, params, processor, draft[:i]) else greedy_token(processed(i)), 0.0)
        return draw(processed(i), params, start + i)

    if draft and request.drafts_sample:
        verdict = rejection.reject_seeded(draft, sent, processed, params, start)
    else:
        verdict = agree(draft, drawn, request.margins)
    if request.logprobs is not None:
        tokens = verdict.token_ids
        verdict.logprobs = logprobs_of([logits(i) for i in range(len(tokens))], tokens, request.logprobs)
    return verdict
