"""Draft and target in one NxDI graph (FusedSpecNeuronConfig), as two runners.

The graph drafts K-1 tokens greedily, verifies them and returns the accepted ones. A row that wants fewer gets the first
of them: all are the target's greedy tokens. Rejected tokens stay on the device.
"""

from __future__ import annotations

from collections.abc import Sequence

from tandem.runners.capabilities import Capabilities, Trait
from tandem.runners.protocol import (
    FusedResult,
    FusedRow,
    FusedStep,
    Limits,
    PrefillRow,
    Proposal,
    ProposeRow,
    RowFailed,
    Runner,
    RunnerIdentity,
    StepShapes,
    VerifyRow,
    sized,
)
from tandem.runners.startup import Startup
from tandem.speculation.types import Verdict
from tandem_nxdi.lines import LineError
from tandem_nxdi.nxdi_runner import Array, NxdiRunner

UNKNOWN = -1  # a draft token that was rejected on the device and never copied to the host


class FusedRunner(NxdiRunner):
    """The pair's target: prefills both models, verifies its own graph's drafts alone."""

    def fused_with(self, draft: Runner) -> FusedStep | None:
        if isinstance(draft, FusedDraft) and draft.pair is self:
            return self.rounds
        return None

    def rounds(self, rows: Sequence[FusedRow]) -> list[FusedResult | RowFailed]:
        """Runs a round of every row in one call."""
        results: dict[int, FusedResult | RowFailed] = {}
        fed: dict[int, tuple[int, tuple[int, ...]]] = {}
        for r, row in enumerate(rows):
            p = row.propose
            try:
                self.lines.check(p.slot, p.position, 1)
            except LineError as error:
                results[r] = RowFailed(str(error))
                continue
            if p.position == 0:
                (outputs,) = self.after_first(p.slot, p.tail[-1])
                results[r] = FusedResult(Proposal(()), Verdict((int(outputs),), 0))
            else:
                fed[p.slot] = (p.position, p.tail[-1:])
        if fed:
            answer, _ = self.call(fed)
            for r, row in enumerate(rows):
                if r not in results:
                    results[r] = self._result(row, answer)
        return sized([results[r] for r in range(len(rows))], self.shapes, [self.layout.span] * len(rows))

    def predicted(self, answer: Sequence[Array], line: int, window: slice) -> Array:
        """The first accepted token, [1]."""
        return answer[line][:1]

    def _result(self, row: FusedRow, answer: Sequence[Array]) -> FusedResult:
        p, most = row.propose, self.layout.span - 1
        outputs = tuple(int(t) for t in answer[p.slot])
        self.lines.note(p.slot, p.position, (p.tail[-1], *outputs[:-1]))
        accepted = min(len(outputs) - 1, p.k)
        draft = (*outputs[:accepted], *[UNKNOWN] * (min(p.k, most) - accepted))
        return FusedResult(Proposal(draft), Verdict(outputs[: accepted + 1], accepted))


class FusedDraft:
    """The pair's draft; the pair's calls fill its cache."""

    def __init__(self, pair: FusedRunner, identity: RunnerIdentity) -> None:
        self.pair, self.identity = pair, identity
        self.capabilities = Capabilities(frozenset({Trait.NXD_INFERENCE, Trait.ONE_GRAPH}))

    @property
    def limits(self) -> Limits:
        return self.pair.limits

    @property
    def shapes(self) -> StepShapes:
        return self.pair.shapes

    def warm_up(self, startup: Startup | None = None) -> None:
        """The pair warms up."""

    def prefill(self, rows: Sequence[PrefillRow]) -> list[RowFailed | None]:
        return [None] * len(rows)

    def verify(self, rows: Sequence[VerifyRow]) -> list[Verdict | RowFailed]:
        return [RowFailed("the draft of a fused graph verifies nothing")] * len(rows)

    def propose(self, rows: Sequence[ProposeRow]) -> list[Proposal | RowFailed]:
        return [RowFailed("the draft of a fused graph proposes only inside it")] * len(rows)

    def fused_with(self, draft: Runner) -> FusedStep | None:
        return None
