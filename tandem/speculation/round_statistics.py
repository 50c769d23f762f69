"""Collects the costs and acceptance rates of a process's rounds, from which new sessions start."""

from __future__ import annotations

from tandem.speculation.acceptance_rates import AcceptanceCounts
from tandem.speculation.step_times import RecentMedian, StepTimes
from tandem.speculation.types import Draft, Proposer, Verdict

FADING = 0.998  # factor per round by which acceptance counts fade
PRIOR = {Proposer.NGRAM: 0.85, Proposer.MODEL: 0.7}  # acceptance before anything was drafted
PRIOR_COPIED = 0.2  # share of drafts that are copies, before anything was drafted
FADING_COMMITTED, FADING_COMPANY = 0.97, 0.8  # factors per round: of tokens committed, and of rows sharing the step
ANY_ROWS = 1  # a verification's cost depends on its tokens, not on how many rows they belong to


class RoundStatistics:
    """Measurements shared by the sessions of a process that verify at the same target.

    The cost of a verification depends on the tokens of its whole step, that of a draft on its length and the rows of
    its step. `drafted` and `undrafted` are the seconds that a round takes beyond both, for network and handling, with
    and without asking for a draft, which may need a round trip of its own. Waiting for other rows' steps is excluded,
    because that work (for example a new prompt) is the same however many rounds this session takes. On average
    `neighbours` other rows share a row's step and add `other_tokens` tokens to it, a round commits `committed` tokens,
    and its draft takes `drafting` seconds.
    """

    def __init__(self) -> None:
        self.verify, self.draft = StepTimes(growing_share=0.1), StepTimes(growing_share=1.0)
        self.drafted, self.undrafted = RecentMedian(), RecentMedian()
        self.accepted = {proposer: AcceptanceCounts(FADING) for proposer in Proposer}
        self.copied = PRIOR_COPIED
        self.neighbours = self.other_tokens = self.drafting = 0.0
        self.committed = 1.0
        self.rounds = 0
        self.rounds_since_plain = 0

    def note(self, requested: int, draft: Draft, verdict: Verdict, seconds: float, steady: bool) -> None:
        """Records a round. `steady`: the draft model had no more unprocessed tokens than usual."""
        self.rounds += 1
        drafted, step_tokens = len(draft.token_ids), tokens_of_step(verdict, len(draft.token_ids))
        self.committed += (1 - FADING_COMMITTED) * (len(verdict.token_ids) - self.committed)
        self.neighbours += (1 - FADING_COMPANY) * (verdict.rows - 1 - self.neighbours)
        self.other_tokens += (1 - FADING_COMPANY) * (step_tokens - drafted - 1 - self.other_tokens)
        self.drafting += (1 - FADING_COMMITTED) * (draft.compute_seconds - self.drafting)
        self.rounds_since_plain = self.rounds_since_plain + 1 if requested else 0
        by = proposer_of(draft)
        if verdict.compute_seconds > 0:
            self.verify.note(ANY_ROWS, step_tokens, verdict.compute_seconds)
        if by is Proposer.MODEL and steady:
            self.draft.note(draft.rows, drafted, draft.compute_seconds)
        if by is not Proposer.MODEL or steady:
            rest = without_queue(seconds, draft, verdict) - draft.compute_seconds - verdict.compute_seconds
            (self.drafted if requested else self.undrafted).note(rest)
        if by is not None:
            self.accepted[by].note(drafted, verdict.accepted)
        if requested:
            self.copied += (1 - FADING) * ((by is Proposer.NGRAM) - self.copied)

    def rates(self, proposer: Proposer, most: int) -> list[float]:
        """Returns the acceptance rates to expect of a new session, by position."""
        return self.accepted[proposer].rates([PRIOR[proposer]] * most, together=4, each=10)[0]

    @property
    def overhead_seconds(self) -> tuple[float, float]:
        """Seconds of a round beyond draft and verification: (without asking for a draft, with asking)."""
        drafted, undrafted = self.drafted.median, self.undrafted.median
        if undrafted is None:
            return drafted or 0.0, drafted or 0.0
        return undrafted, undrafted if drafted is None else drafted


def without_queue(seconds: float, draft: Draft, verdict: Verdict) -> float:
    """Returns a round's seconds minus the time it waited for other rows' steps."""
    return seconds - draft.queue_seconds - verdict.queue_seconds


def tokens_of_step(verdict: Verdict, drafted: int) -> int:
    """Returns the tokens of the step that verified a draft of `drafted` tokens."""
    return verdict.step_tokens or verdict.rows * max(verdict.width, drafted + 1)


def proposer_of(draft: Draft) -> Proposer | None:
    """Returns the proposer of a round's draft, or None if it is empty."""
    if not draft.token_ids:
        return None
    return draft.proposed_by[0] if draft.proposed_by else Proposer.MODEL
