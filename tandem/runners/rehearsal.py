"""Makes steps take as long as on another device: computed here, then waited out."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from tandem.host.device_times import DeviceTimes, StepTimes
from tandem.runners.capabilities import Capabilities, No
from tandem.runners.protocol import (
    FusedResult,
    FusedRow,
    FusedStep,
    Limits,
    PrefillRow,
    Proposal,
    ProposeRow,
    Result,
    RowFailed,
    Runner,
    RunnerIdentity,
    StepShapes,
    VerifyRow,
)
from tandem.runners.startup import Startup
from tandem.speculation.types import Rehearsal, Verdict

log = logging.getLogger("tandem.engine")

LATE_SECONDS = 0.0005  # lateness of a step's end; waking up takes less
NOT_ONE_GRAPH = No("its steps are rehearsed, each model's by itself")


def rehearsed(runner: Runner, device: DeviceTimes | None, verifies: bool) -> Runner:
    """The runner with the device's times, if they cover this part; call it after `warm_up`."""
    times = device and (device.target if verifies else device.draft)
    if not device or not times:
        return runner
    source = f"{device.source}; assumed: {device.assumed}" if device.assumed else device.source
    counts = Rehearsal("target" if verifies else "draft", device.name, device.device, source)
    return RehearsedRunner(runner, times, counts)


def bare(runner: Runner) -> Runner:
    return runner.inner if isinstance(runner, RehearsedRunner) else runner


class RehearsedRunner:
    """Runs the steps of `inner` in the times of another device."""

    def __init__(self, inner: Runner, times: StepTimes, counts: Rehearsal) -> None:
        self.inner, self._times, self._counts = inner, times, counts

    @property
    def limits(self) -> Limits:
        return self.inner.limits

    @property
    def identity(self) -> RunnerIdentity:
        """The model here, on the rehearsed device."""
        own = self.inner.identity
        return replace(own, device=f"{self._counts.device}, rehearsed on {own.device}", rehearsal=self._counts)

    @property
    def shapes(self) -> StepShapes:
        return self.inner.shapes

    @property
    def capabilities(self) -> Capabilities:
        return replace(self.inner.capabilities, fuse=NOT_ONE_GRAPH, shared_steps=False)

    def warm_up(self, startup: Startup | None = None) -> None:
        self.inner.warm_up(startup)

    def prefill(self, rows: Sequence[PrefillRow]) -> list[RowFailed | None]:
        longest = max(row.start + len(row.tokens) for row in rows)
        seconds = (self._times.prefill or self._times).seconds(max(len(row.tokens) for row in rows), len(rows), longest)
        return self._taking(seconds, lambda: self.inner.prefill(rows))

    def verify(self, rows: Sequence[VerifyRow]) -> list[Verdict | RowFailed]:
        widths = [1 + len(row.draft) for row in rows]
        seconds = self._verifying(widths, [row.position + width for row, width in zip(rows, widths, strict=True)])
        return self._taking(seconds, lambda: self.inner.verify(rows))

    def propose(self, rows: Sequence[ProposeRow]) -> list[Proposal | RowFailed]:
        seconds = self.drafting(rows)
        drafts = self._taking(seconds, lambda: self.inner.propose(rows))
        return [each if isinstance(each, RowFailed) else replace(each, seconds=seconds) for each in drafts]

    def fused_with(self, draft: Runner) -> FusedStep | None:
        """One call of both, if both are rehearsed and have one, in the times of draft plus verification."""
        if not isinstance(draft, RehearsedRunner) or (step := self.inner.fused_with(draft.inner)) is None:
            return None

        def fused(rows: Sequence[FusedRow]) -> list[FusedResult | RowFailed]:
            proposed = [row.propose for row in rows if not row.copied and row.propose.k]
            drafted = draft.drafting(proposed) if proposed else 0.0
            widths = [1 + (len(row.copied) or row.propose.k) for row in rows]
            ends = [row.propose.position + width for row, width in zip(rows, widths, strict=True)]
            results = self._taking(drafted + self._verifying(widths, ends), lambda: step(rows))
            return [_drafted(result, drafted) for result in results]

        return fused

    def drafting(self, rows: Sequence[ProposeRow]) -> float:
        """Seconds of a proposal: a step per draft token; the first also feeds the rest of a tail."""
        end, times = max(row.position + row.k for row in rows), self._times
        first = times.seconds(max(len(row.tail) for row in rows), len(rows), end)
        return first + max(0, max(row.k for row in rows) - 1) * times.seconds(1, len(rows), end)

    def _verifying(self, widths: Sequence[int], ends: Sequence[int]) -> float:
        return self._times.seconds(max(widths), len(widths), max(ends))

    def _taking(self, seconds: float, step: Callable[[], list[Result]]) -> list[Result]:
        due = time.monotonic() + seconds
        results = step()
        while (left := due - time.monotonic()) > 0:
            time.sleep(left)
        self._counts.steps += 1
        if -left > LATE_SECONDS:
            if not self._counts.late_steps:
                log.warning(
                    "rehearsed late: a step of the %s took %.1f ms and would have taken %.1f ms on %s; late steps are"
                    " counted",
                    *(self._counts.part, 1000 * (seconds - left), 1000 * seconds, self._counts.device),
                )
            self._counts.late_steps += 1
            self._counts.late_seconds -= left
        return results


def _drafted(result: FusedResult | RowFailed, seconds: float) -> FusedResult | RowFailed:
    if isinstance(result, RowFailed):
        return result
    proposal = replace(result.proposal, seconds=seconds if result.proposal.seconds else 0.0)  # a copy took no time
    return replace(result, proposal=proposal, draft_seconds=seconds)
