"""Applies a request's verification rule to logits, for the draft and for the target. Runners call this.

At temperature 0, and with nothing drafted, both rules are the same: comparison with the target's own draws.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tandem.speculation import rejection
from tandem.speculation.acceptance import agree
from tandem.speculation.draws import BadLogits, draw
from tandem.speculation.rejection import Logits
from tandem.speculation.types import Rule, SamplingParams, SparseDistribution, Verdict


def samples_from_its_own(rule: Rule, params: SamplingParams) -> bool:
    """Returns whether the draft draws from a distribution that the verifier must know."""
    return rule is Rule.REJECTION and not params.greedy


def draft_token(
    logits: Logits, params: SamplingParams, rule: Rule, position: int, target_vocab_size: int | None = None
) -> tuple[int, SparseDistribution | None]:
    """Draws a draft token for `position`; returns it with its distribution, if the verifier must know that.

    `logits`: float32 [vocabulary]. `target_vocab_size` is used by the rejection rule only.
    """
    if samples_from_its_own(rule, params):
        return rejection.draft_token(logits, params, position, target_vocab_size)
    try:
        return draw(logits, params, position).token, None
    except BadLogits:
        return 0, None  # a draft may be wrong about anything


def verify_draft(
    draft: Sequence[int],
    sent: Sequence[SparseDistribution],
    logits: Callable[[int], Logits],
    params: SamplingParams,
    rule: Rule,
    start: int,
    margins: bool = False,
) -> Verdict:
    """Returns what a round commits.

    `logits(i)`: the target's logits, float32 [vocabulary], after draft[:i]. `start`: the position of draft[0]. Raises
    BadLogits.
    """
    if draft and samples_from_its_own(rule, params):
        return rejection.reject_seeded(draft, sent, logits, params, start)
    return agree(draft, lambda i: draw(logits(i), params, start + i), margins)
