"""Applies a request's verification rule to logits, for the draft and for the target. Runners call this.

At temperature 0, and with nothing drafted, both rules are the same: comparison with the target's own draws.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from tandem.speculation import rejection
from tandem.speculation.acceptance import agree
from tandem.speculation.draws import BadLogits, Drawn, best_token, draw, greedy_token
from tandem.speculation.logprobs import LogprobsOf, all_logprobs
from tandem.speculation.processing import Processor
from tandem.speculation.rejection import Logits
from tandem.speculation.types import Rule, SamplingParams, SecondChoice, SparseDistribution, Verdict


def samples_from_its_own(rule: Rule, params: SamplingParams) -> bool:
    """Returns whether the draft draws from a distribution that the verifier must know."""
    return rule is Rule.REJECTION and not params.greedy


def settled(best: int, params: SamplingParams, processor: Processor | None, draft: Sequence[int]) -> bool:
    """Returns whether the token after `draft` is `best`, the id of the largest raw logit (-1: none is sound)."""
    return best >= 0 and params.greedy and (processor is None or processor.keeps(best, draft))


def draft_token(
    logits: Logits,
    params: SamplingParams,
    rule: Rule,
    position: int,
    target_vocab_size: int | None = None,
    processor: Processor | None = None,
    drafted: Sequence[int] = (),
) -> tuple[int, SparseDistribution | None]:
    """Draws a draft token for `position`; returns it with its distribution, if the verifier must know that.

    `logits`: float32 [vocabulary]. `target_vocab_size` is used by the rejection rule only.
    `drafted`: the draft tokens before it, which `processor` needs.
    """
    if params.greedy and settled(best := best_token(logits), params, processor, drafted):
        return best, None
    if samples_from_its_own(rule, params):
        if processor:
            logits = _processed_draft(logits, processor, drafted)
        return rejection.draft_token(logits, params, position, target_vocab_size)
    return draft_choices(logits, params, position, processor, drafted)[0], None


def draft_choices(
    logits: Logits,
    params: SamplingParams,
    position: int,
    processor: Processor | None = None,
    drafted: Sequence[int] = (),
) -> tuple[int, SecondChoice | None]:
    """Draws a draft token under agreement, like `draft_token`, and the one that comes second in the same draw."""
    if processor:
        logits = _processed_draft(logits, processor, drafted)
    try:
        drawn = draw(logits, params, position)
    except BadLogits:
        return 0, None  # a draft may be wrong about anything
    return drawn.token, SecondChoice(drawn.second, drawn.margin) if drawn.second >= 0 else None


def _processed_draft(logits: Logits, processor: Processor, drafted: Sequence[int]) -> Logits:
    try:
        return processor.logits(logits, drafted)
    except BadLogits:
        return np.full_like(logits, -np.inf)  # a draft may be wrong about anything


def verify_draft(
    draft: Sequence[int],
    sent: Sequence[SparseDistribution],
    logits: Callable[[int], Logits],
    params: SamplingParams,
    rule: Rule,
    start: int,
    margins: bool = False,
    processor: Processor | None = None,
    logprobs: int | None = None,
    logprobs_of: LogprobsOf = all_logprobs,
    best: Callable[[int], int] | None = None,
) -> Verdict:
    """Returns what a round commits.

    `logits(i)`: the target's logits, float32 [vocabulary], after draft[:i]. `start`: the position of draft[0].
    `processor` changes logits before tokens are drawn. `logprobs`: how many likeliest tokens to report for each token
    (None: report nothing). `best(i)`: the id of the largest of logits(i), -1 if they are unsound; None: to be found.
    Raises BadLogits.
    """
    best = best or (lambda i: best_token(logits(i)))

    def processed(i: int) -> Logits:
        return logits(i) if processor is None else processor.logits(logits(i), draft[:i])

    def drawn(i: int) -> Drawn:
        if params.greedy and not margins:
            token = best(i)
            return Drawn(token if settled(token, params, processor, draft[:i]) else greedy_token(processed(i)), 0.0)
        return draw(processed(i), params, start + i)

    if draft and samples_from_its_own(rule, params):
        verdict = rejection.reject_seeded(draft, sent, processed, params, start)
    else:
        verdict = agree(draft, drawn, margins)
    if logprobs is None:
        return verdict
    tokens = verdict.token_ids
    return replace(verdict, logprobs=logprobs_of([logits(i) for i in range(len(tokens))], tokens, logprobs))
