"""Runs of a local target, with drafts from elsewhere or none."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence

from tandem.engine.sequences import LocalVerifier, RunStepper, TargetSequence
from tandem.speculation.estimate import Estimate
from tandem.speculation.length import FixedLength
from tandem.speculation.lookup_policy import PolicedLookup
from tandem.speculation.loop import Rounds
from tandem.speculation.never_waiting import OnStep
from tandem.speculation.rounds import OutOfStep
from tandem.speculation.run_on import MAX_UNREAD, RunMessage, SelfPacedRun
from tandem.speculation.types import Draft, LengthPlan, Proposer, Verdict


class LocalRunVerifier:
    """One request's run of a local target, until a token of `stops`."""

    window = MAX_UNREAD

    def __init__(self, verifier: LocalVerifier, estimate: Estimate, stops: Collection[int] = ()) -> None:
        self._verifier, self._lookup, self._stops = verifier, PolicedLookup(estimate, only_grows=True), stops
        self._run: SelfPacedRun | None = None
        self._stepping: asyncio.Task[None] | None = None

    async def open(self, prompt: Sequence[int]) -> None:
        await self._verifier.open(prompt)

    def begin(self, tokens: Sequence[int], on_step: OnStep) -> None:
        sequence = self._verifier.sequence
        assert sequence is not None, "open comes first"
        self._run = SelfPacedRun(tokens, self._stops, lookup=self._lookup)
        sequence.set_stepper(RunStepper(sequence, self._run))
        self._stepping = asyncio.create_task(self._step_on(sequence, self._run, list(tokens), on_step), name="step on")

    def send(self, message: RunMessage) -> None:
        assert self._run is not None, "begin comes first"
        self._run.receive(message)

    async def _step_on(self, sequence: TargetSequence, run: SelfPacedRun, tokens: list[int], on_step: OnStep) -> None:
        try:
            await self._lookup.open(tokens)
            while True:
                run.news.clear()
                if (found := await sequence.next_verdict()) is None:
                    await run.news.wait()
                    continue
                row, verdict = found
                tokens += verdict.token_ids
                run.stepped(len(row.draft), verdict.compute_seconds, verdict.rows)
                verdict.drafted, verdict.copied = len(row.draft), row.copied
                on_step(verdict)
        except Exception as error:
            on_step(error)

    async def resume(self, tokens: Sequence[int], cause: Exception) -> None:
        """Ends the run. Raises any other `cause`: a local target is not lost."""
        if not isinstance(cause, OutOfStep):
            raise cause
        await self._leave()

    async def close(self) -> None:
        try:
            await self._leave()
        finally:
            await self._verifier.close()

    async def _leave(self) -> None:
        if self._verifier.sequence:
            self._verifier.sequence.set_stepper(None)
        stepping, self._stepping, self._run = self._stepping, None, None
        if stepping:
            stepping.cancel()
            await asyncio.gather(stepping, return_exceptions=True)


class UndraftedRounds(Rounds):
    """Rounds without a drafter: plain, or with copies of `lookup`, of at most `most` tokens, where they pay."""

    def __init__(
        self, verifier: LocalVerifier, stops: Collection[int] | None, most: int = 0, lookup: PolicedLookup | None = None
    ) -> None:
        # stops: tokens that end the text; None: a string may, so the device begins no round by itself
        self._verifier, self._stops, self._most = verifier, stops, most
        self._lookup = lookup if most else None
        self.lengths = FixedLength(most)

    async def open(self, prompt: Sequence[int]) -> None:
        await self._verifier.open(prompt, begins=True)
        if self._lookup:
            await self._lookup.open(prompt)
        sequence = self._verifier.sequence
        assert sequence is not None
        end = sequence.most_tokens(len(prompt))
        run = SelfPacedRun(prompt, self._stops or (), end, lookup=self._lookup)
        run.receive(RunMessage(len(prompt), prompt[-1], (), end, 0, self._most))
        sequence.set_stepper(RunStepper(sequence, run, self_paced=self._stops is not None))

    async def round(self, tokens: Sequence[int], plan: LengthPlan) -> tuple[Draft, Verdict]:
        assert self._verifier.sequence is not None, "open comes first"
        found = await self._verifier.sequence.next_verdict()
        assert found is not None, "the text has ended"
        row, verdict = found
        if self._lookup:
            self._lookup.stepped(len(row.draft), verdict.compute_seconds, verdict.rows)
        return Draft(row.draft, proposed_by=(Proposer.NGRAM,) * len(row.draft)), verdict

    async def close(self) -> None:
        await self._verifier.close()
