"""What a process has learned about its rounds: costs and acceptance, from which new sessions begin informed. Pure."""

from __future__ import annotations

from tandem.speculation.acceptance_rates import AcceptanceCounts
from tandem.speculation.step_times import Recent, StepTimes
from tandem.speculation.types import Draft, Proposer, Verdict

FADING = 0.998  # of acceptance, a round
BEFOREHAND = {Proposer.NGRAM: 0.85, Proposer.MODEL: 0.7}  # acceptance before anything was drafted
COPIED_BEFOREHAND = 0.2
FADING_COMMITTED, FADING_COMPANY = 0.97, 0.8  # of what a round commits, and of who shares its step, a round
ALONE = 1  # whose a verification's tokens are makes no difference


class RoundStatistics:
    """Shared by the sessions of a process that verify at the same target.

    A verification costs by the tokens of the step that it shares, a draft by its length and its step's rows. `drafted`
    and `undrafted` are what a round takes beyond both: network, handling. Rounds that ask for drafts are kept apart
    from those that don't: asking may be a round trip of its own. Waiting for the steps of others is in neither: it is
    their work, a newcomer's prompt for one, which stays the same however many rounds this takes. `neighbours` share a
    step with a row, and bring `beside` tokens into it; `committed` tokens come of a round, and `drafting` seconds go
    into its draft.
    """

    def __init__(self) -> None:
        self.verify, self.draft = StepTimes(growing=0.1), StepTimes(growing=1.0)
        self.drafted, self.undrafted = Recent(), Recent()
        self.accepted = {proposer: AcceptanceCounts(FADING) for proposer in Proposer}
        self.copied = COPIED_BEFOREHAND
        self.neighbours = self.beside = self.drafting = 0.0
        self.committed = 1.0
        self.rounds = 0
        self.rounds_since_plain = 0

    def note(self, asked: int, draft: Draft, verdict: Verdict, seconds: float, steady: bool) -> None:
        """A round. `steady`: the draft model had no more to catch up on than it usually has."""
        self.rounds += 1
        drafted, step_tokens = len(draft.token_ids), tokens_of_step(verdict, len(draft.token_ids))
        self.committed += (1 - FADING_COMMITTED) * (len(verdict.token_ids) - self.committed)
        self.neighbours += (1 - FADING_COMPANY) * (verdict.rows - 1 - self.neighbours)
        self.beside += (1 - FADING_COMPANY) * (step_tokens - drafted - 1 - self.beside)
        self.drafting += (1 - FADING_COMMITTED) * (draft.compute_seconds - self.drafting)
        self.rounds_since_plain = self.rounds_since_plain + 1 if asked else 0
        by = proposer_of(draft)
        if verdict.compute_seconds > 0:
            self.verify.note(ALONE, step_tokens, verdict.compute_seconds)
        if by is Proposer.MODEL and steady:
            self.draft.note(draft.rows, drafted, draft.compute_seconds)
        if by is not Proposer.MODEL or steady:
            rest = without_queue(seconds, draft, verdict) - draft.compute_seconds - verdict.compute_seconds
            (self.drafted if asked else self.undrafted).note(rest)
        if by is not None:
            self.accepted[by].note(drafted, verdict.accepted)
        if asked:
            self.copied += (1 - FADING) * ((by is Proposer.NGRAM) - self.copied)

    def rates(self, proposer: Proposer, most: int) -> list[float]:
        """Acceptance to expect of a new session, by position."""
        return self.accepted[proposer].rates([BEFOREHAND[proposer]] * most, together=4, each=10)[0]

    @property
    def seconds_beside(self) -> tuple[float, float]:
        """Of a round beyond draft and verification: (without drafts, with them)."""
        drafted, undrafted = self.drafted.median, self.undrafted.median
        if undrafted is None:
            return drafted or 0.0, drafted or 0.0
        return undrafted, undrafted if drafted is None else drafted


def without_queue(seconds: float, draft: Draft, verdict: Verdict) -> float:
    """A round's seconds less what it waited for the steps of others."""
    return seconds - draft.queue_seconds - verdict.queue_seconds


def tokens_of_step(verdict: Verdict, drafted: int) -> int:
    """Of the step that verified a draft of `drafted` tokens."""
    return verdict.step_tokens or verdict.rows * max(verdict.width, drafted + 1)


def proposer_of(draft: Draft) -> Proposer | None:
    """Who proposed a round's draft; None where nobody did."""
    if not draft.token_ids:
        return None
    return draft.proposed_by[0] if draft.proposed_by else Proposer.MODEL
