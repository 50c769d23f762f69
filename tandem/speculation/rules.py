"""A request's verification rule applied to logits, on the draft's side and on the target's: what a runner calls.

At temperature 0, and where nothing is drafted, the two rules are one: comparison with the target's own draws.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tandem.speculation import rejection
from tandem.speculation.acceptance import agree
from tandem.speculation.draws import BadLogits, draw
from tandem.speculation.rejection import Logits
from tandem.speculation.types import Rule, SamplingParams, SparseDistribution, Verdict


def samples_from_its_own(rule: Rule, params: SamplingParams) -> bool:
    """Whether a draft draws from a distribution that the verifier must know."""
    return rule is Rule.REJECTION and not params.greedy


def draft_token(
    logits: Logits, params: SamplingParams, rule: Rule, position: int, known: int | None = None
) -> tuple[int, SparseDistribution | None]:
    """A draft token for `position`, and what it was drawn from where the verifier must know.

    `known`: how many of the first ids the target has; only the rejection rule minds.
    """
    if samples_from_its_own(rule, params):
        return rejection.draft_token(logits, params, position, known)
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
    """What a round commits. `logits(i)` are the target's after draft[:i], `start` the position of draft[0].

    Raises BadLogits.
    """
    if draft and samples_from_its_own(rule, params):
        return rejection.reject_seeded(draft, sent, logits, params, start)
    return agree(draft, lambda i: draw(logits(i), params, start + i), margins)
