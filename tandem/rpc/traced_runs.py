"""Wraps the run of a target that never waits in trace spans. Without tracing, it is returned unwrapped."""

from __future__ import annotations

import time
from collections.abc import Sequence

from tandem.rpc.request_context import Attributes, Span, current_span, within
from tandem.speculation.never_waiting import RunStep, RunVerifier
from tandem.speculation.run_on import RunMessage
from tandem.speculation.types import SamplingParams


def traced_run(verifier: RunVerifier) -> RunVerifier:
    """Traces a run whose session somebody else opens."""
    span = current_span()
    return TracedRun(verifier, span) if span else verifier


class TracedRun:
    """A span `run` from a run's beginning to its end; within it one `round` a step, and one `drafts` a draft.

    `span` is the request's: drafts and steps overlap.
    """

    def __init__(self, inner: RunVerifier, span: Span) -> None:
        self._inner, self._span = inner, span
        self._run: Span | None = None
        self._sent: _SentDraft | None = None
        self._length = self._steps = self._drafted = self._accepted = 0

    @property
    def window(self) -> int:
        return self._inner.window

    async def open(self, prompt: Sequence[int], sampling: SamplingParams) -> None:
        await self._inner.open(prompt, sampling)

    def begin(self, tokens: Sequence[int]) -> None:
        self._length = len(tokens)
        self._run = self._span.child("run", {"base_length": self._length}, "client")
        self._inner.begin(tokens)

    def send(self, message: RunMessage) -> None:
        draft = message.draft
        if self._run and draft.nodes:
            self._end_draft()
            about = {"base_length": draft.base_length, "drafted": draft.nodes, "branches": len(draft.branches)}
            self._sent = _SentDraft(self._run.child("drafts", about), draft.base_length, draft.token_ids)
        self._inner.send(message)

    async def step(self) -> RunStep:
        step = await self._inner.step()
        verdict, now = step.verdict, time.time()
        if self._run:
            about = {"k": step.drafted, "base_length": self._length, "accepted": verdict.accepted, "stale": False}
            seconds = {"queue_seconds": verdict.queue_seconds, "compute_seconds": verdict.compute_seconds}
            began = now - verdict.queue_seconds - verdict.compute_seconds
            self._run.child("round", {**about, **seconds}, started=began).end(at=now)
        if self._sent and self._sent.passed(self._length, verdict.token_ids):
            self._end_draft()
        self._length += len(verdict.token_ids)
        self._steps += 1
        self._drafted += step.drafted
        self._accepted += verdict.accepted
        return step

    async def resume(self, tokens: Sequence[int], cause: Exception) -> None:
        self._end_run()
        about: Attributes = {"base_length": len(tokens), "cause": type(cause).__name__}
        with within(self._span.child("resume", about)):
            await self._inner.resume(tokens, cause)

    async def close(self) -> None:
        self._end_run()
        await self._inner.close()

    def _end_draft(self) -> None:
        sent, self._sent = self._sent, None
        if sent:
            sent.span.note({"agreed": sent.agreed, "overtaken": sent.overtaken})
            sent.span.end()

    def _end_run(self) -> None:
        self._end_draft()
        run, self._run = self._run, None
        if run:
            run.note({"steps": self._steps, "drafted": self._drafted, "accepted": self._accepted})
            run.end()
        self._steps = self._drafted = self._accepted = 0


class _SentDraft:
    """The newest draft that a run was sent. `agreed`: its tokens that were committed; `overtaken`: others were."""

    def __init__(self, span: Span, base: int, token_ids: Sequence[int]) -> None:
        self.span, self._base, self._token_ids = span, base, token_ids
        self.agreed, self.overtaken = 0, False

    def passed(self, length: int, token_ids: Sequence[int]) -> bool:
        """Follows tokens that were committed at `length`. Returns whether nothing of the draft is left."""
        for at, token in enumerate(token_ids, length - self._base):
            if 0 <= at < len(self._token_ids) and not self.overtaken:
                self.overtaken = self._token_ids[at] != token
                self.agreed += not self.overtaken
        return self.overtaken or length + len(token_ids) >= self._base + len(self._token_ids)
