"""Implements speculation's RunVerifier on a local target: it steps on while drafts come from elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence

from tandem.engine.sequences import LocalVerifier
from tandem.speculation.never_waiting import RunStep
from tandem.speculation.pipeline import OutOfStep
from tandem.speculation.run_on import MAX_UNREAD, RunMessage, RunOn


class LocalRunVerifier:
    """The run of a local target for one request. It ends at a token of `stops`."""

    window = MAX_UNREAD

    def __init__(self, verifier: LocalVerifier, stops: Collection[int] = ()) -> None:
        self._verifier, self._stops = verifier, stops
        self._tokens: list[int] = []
        self._run: RunOn | None = None
        self._news = asyncio.Event()

    async def open(self, prompt: Sequence[int]) -> None:
        await self._verifier.open(prompt)

    def begin(self, tokens: Sequence[int]) -> None:
        self._tokens, self._run = list(tokens), RunOn(tokens, self._stops)

    def send(self, message: RunMessage) -> None:
        assert self._run is not None, "begin comes first"
        self._run.hear(message)
        self._news.set()

    async def step(self) -> RunStep:
        assert self._run is not None, "begin comes first"
        while (draft := self._run.next_draft()) is None:
            self._news.clear()
            await self._news.wait()
        verdict = await self._verifier.verify(self._tokens, draft)
        self._tokens += verdict.token_ids
        self._run.commit(verdict.token_ids)
        return RunStep(verdict, len(draft))

    async def resume(self, tokens: Sequence[int], cause: Exception) -> None:
        """Ends the run. A local target is not lost: raises any cause but that the run was ended."""
        if not isinstance(cause, OutOfStep):
            raise cause
        self._run = None

    async def close(self) -> None:
        await self._verifier.close()
