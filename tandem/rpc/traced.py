"""Trace spans of a request's drafts and rounds; untraced requests are not wrapped."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Sequence
from functools import partial
from typing import Any, TypeVar, cast

from tandem.rpc.request_context import Attributes, current_span, within
from tandem.rpc.tracing import Span
from tandem.speculation.never_waiting import OnStep, RunStep, RunVerifier
from tandem.speculation.rounds import Answer
from tandem.speculation.run_on import RunMessage
from tandem.speculation.types import Draft, Verdict

Inner = TypeVar("Inner")
Result = TypeVar("Result")


def traced(inner: Inner, opening: str = "open") -> Inner:
    """Wraps a drafter, verifier or rounds in spans; `opening`: of `open`, "" if its caller has one."""
    span = current_span()
    return cast(Inner, Traced(inner, span, opening)) if span else inner


def traced_run(verifier: RunVerifier) -> RunVerifier:
    span = current_span()
    return cast(RunVerifier, TracedRun(verifier, span)) if span else verifier


class Traced:
    """Calls `inner` inside spans below the request's `span`; other attributes pass through."""

    def __init__(self, inner: Any, span: Span, opening: str = "") -> None:
        self._inner, self._span, self._opening = inner, span, opening

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def _spanned(
        self, name: str, about: Attributes, work: Awaitable[Result], kind: str = "internal", parent: Span | None = None
    ) -> Result:
        span = (parent or current_span() or self._span).child(name, about, kind)
        with within(span):
            result = await work
            span.note(_outcome(result))
        return result

    async def open(self, prompt: Sequence[int]) -> None:
        work: Awaitable[None] = self._inner.open(prompt)
        await (self._spanned(self._opening, {"prompt_tokens": len(prompt)}, work) if self._opening else work)

    async def propose(self, tokens: Sequence[int], k: int, model_k: int | None = None) -> Draft:
        about = {"k": k, "base_length": len(tokens)}
        return await self._spanned("draft", about, self._inner.propose(tokens, k, model_k))

    async def draft_bonus(self, tokens: Sequence[int]) -> Draft:
        return await self._spanned("guess", {"base_length": len(tokens)}, self._inner.draft_bonus(tokens))

    async def round(self, tokens: Sequence[int], k: int, model_k: int | None = None) -> tuple[Draft, Verdict]:
        return await self._spanned("round", {"base_length": len(tokens)}, self._inner.round(tokens, k, model_k))

    def send(self, tokens: Sequence[int], draft: Draft) -> asyncio.Future[Answer]:
        # Rounds overlap, so their spans are children of the request's.
        span = self._span.child("round", {"k": len(draft.token_ids), "base_length": len(tokens)}, "client")
        answer: asyncio.Future[Answer] = self._inner.send(tokens, draft)
        answer.add_done_callback(partial(_answered, span))
        return answer

    async def resume(self, tokens: Sequence[int], cause: Exception) -> None:
        about: Attributes = {"base_length": len(tokens), "cause": type(cause).__name__}
        await self._spanned("resume", about, self._inner.resume(tokens, cause), parent=self._span)


class TracedRun(Traced):
    _run: Span | None = None
    _length = _steps = _drafted = _accepted = 0

    def begin(self, tokens: Sequence[int], on_step: OnStep) -> None:
        self._length, self._steps, self._drafted, self._accepted = len(tokens), 0, 0, 0
        self._run = self._span.child("run", {"base_length": self._length}, "client")
        self._inner.begin(tokens, partial(self._on_step, on_step))

    def send(self, message: RunMessage) -> None:  # type: ignore[override]  # a run is sent messages, not rounds
        self._inner.send(message)

    def _on_step(self, on_step: OnStep, step: RunStep | Exception) -> None:
        if isinstance(step, RunStep):
            self._note(step)
        on_step(step)

    def _note(self, step: RunStep) -> None:
        verdict, now = step.verdict, time.time()
        if self._run:
            about = {"k": step.drafted, "base_length": self._length, **_outcome(verdict)}
            began = now - verdict.queue_seconds - verdict.compute_seconds
            self._run.child("round", about, started=began).end(at=now)
        self._length += len(verdict.token_ids)
        self._steps += 1
        self._drafted += step.drafted
        self._accepted += verdict.accepted

    async def resume(self, tokens: Sequence[int], cause: Exception) -> None:
        self._end_run()
        await super().resume(tokens, cause)

    async def close(self) -> None:
        self._end_run()
        await self._inner.close()

    def _end_run(self) -> None:
        run, self._run = self._run, None
        if run:
            run.note({"steps": self._steps, "drafted": self._drafted, "accepted": self._accepted})
            run.end()


def _outcome(result: Any) -> Attributes:
    if isinstance(result, Draft):
        counts: Attributes = {"drafted": len(result.token_ids)}
    elif isinstance(result, Verdict):
        counts = {"accepted": result.accepted, "stale": False}
    elif isinstance(result, tuple):
        draft, verdict = result
        return {"k": len(draft.token_ids), **_outcome(verdict), "draft_seconds": draft.compute_seconds}
    else:
        return {}
    return {**counts, "queue_seconds": result.queue_seconds, "compute_seconds": result.compute_seconds}


def _answered(span: Span, answer: asyncio.Future[Answer]) -> None:
    # A cancelled round counts as stale.
    error = None if answer.cancelled() else answer.exception()
    if error is None:
        verdict = None if answer.cancelled() else answer.result().verdict
        span.note(_outcome(verdict) if verdict else {"stale": True})
    span.end(type(error).__name__ if error else "")
