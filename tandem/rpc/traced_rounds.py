"""Wraps drafters, verifiers and rounds in trace spans. Without tracing, they are returned unwrapped."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

from tandem.rpc.request_context import Attributes, Span, current_span, within
from tandem.speculation.drafters import BonusDrafter, Drafter, teach
from tandem.speculation.loop import Rounds, Verifier
from tandem.speculation.pipeline import Answer, FlightVerifier
from tandem.speculation.types import Draft, SamplingParams, SparseDistribution, Verdict


def traced_rounds(rounds: Rounds) -> Rounds:
    """Traces rounds whose draft and target both run in this process."""
    span = current_span()
    return TracedRounds(rounds, span) if span else rounds


def traced_verifier(verifier: Verifier) -> Verifier:
    span = current_span()
    return TracedVerifier(verifier, span) if span else verifier


def traced_flights(verifier: FlightVerifier, opened: bool = False) -> FlightVerifier:
    """Traces rounds in flight. `opened`: somebody else opens their session."""
    span = current_span()
    return TracedFlights(verifier, span, opened) if span else verifier


def traced_bonus_drafter(drafter: BonusDrafter) -> BonusDrafter:
    span = current_span()
    return TracedBonusDrafter(drafter, span) if span else drafter


def traced_drafter(drafter: Drafter) -> Drafter:
    span = current_span()
    return TracedDrafter(drafter, span) if span else drafter


class _Opens(Protocol):
    async def open(self, prompt: Sequence[int], sampling: SamplingParams) -> None: ...

    async def close(self) -> None: ...


Opens = TypeVar("Opens", bound=_Opens)
Drafts = TypeVar("Drafts", bound=Drafter)


class _Traced(Generic[Opens]):
    """Base of the wrappers. `span` is the request's. `opened`: somebody else opens it, and traces that."""

    _opening = "open"

    def __init__(self, inner: Opens, span: Span, opened: bool = False) -> None:
        self._inner, self._span, self._opened = inner, span, opened

    def _current(self) -> Span:
        """Returns the innermost active span."""
        return current_span() or self._span

    async def open(self, prompt: Sequence[int], sampling: SamplingParams) -> None:
        if self._opened:
            return await self._inner.open(prompt, sampling)
        with within(self._current().child(self._opening, {"prompt_tokens": len(prompt)})):
            await self._inner.open(prompt, sampling)

    async def close(self) -> None:
        await self._inner.close()


class TracedDrafter(_Traced[Drafts]):
    _opening = "open draft"

    async def propose(self, tokens: Sequence[int], k: int, model_k: int | None = None) -> Draft:
        span = self._current().child("draft", {"k": k, "base_length": len(tokens)})
        with within(span):
            draft = await self._inner.propose(tokens, k, model_k)
            span.note({"drafted": len(draft.token_ids), **_seconds(draft)})
        return draft

    def learn(self, tokens: Sequence[int]) -> None:
        teach(self._inner, tokens)


class TracedBonusDrafter(TracedDrafter[BonusDrafter]):
    async def draft_bonus(self, tokens: Sequence[int]) -> Draft:
        with within(self._current().child("guess", {"base_length": len(tokens)})):
            return await self._inner.draft_bonus(tokens)


class TracedVerifier(_Traced[Verifier]):
    async def verify(
        self, tokens: Sequence[int], draft: Sequence[int], distributions: Sequence[SparseDistribution] = ()
    ) -> Verdict:
        span = self._current().child("round", {"k": len(draft), "base_length": len(tokens)}, "client")
        with within(span):
            verdict = await self._inner.verify(tokens, draft, distributions)
            span.note({"accepted": verdict.accepted, "stale": False, **_seconds(verdict)})
        return verdict


class TracedFlights(_Traced[FlightVerifier]):
    """Traces rounds in flight. Their spans are children of the request's span: several rounds overlap."""

    @property
    def most_in_flight(self) -> int:
        return self._inner.most_in_flight

    def send(self, base_length: int, last_token: int, draft: Draft) -> asyncio.Future[Answer]:
        span = self._span.child("round", {"k": len(draft.token_ids), "base_length": base_length}, "client")
        answer = self._inner.send(base_length, last_token, draft)
        answer.add_done_callback(lambda done: _answered(span, done))
        return answer

    async def resume(self, tokens: Sequence[int], cause: Exception) -> None:
        about: Attributes = {"base_length": len(tokens), "cause": type(cause).__name__}
        with within(self._span.child("resume", about)):
            await self._inner.resume(tokens, cause)


class TracedRounds(_Traced[Rounds]):
    async def round(self, tokens: Sequence[int], k: int, model_k: int | None = None) -> tuple[Draft, Verdict]:
        span = self._current().child("round", {"base_length": len(tokens)})
        with within(span):
            draft, verdict = await self._inner.round(tokens, k, model_k)
            span.note({"k": len(draft.token_ids), "accepted": verdict.accepted, **_seconds(verdict)})
            span.note({"draft_seconds": draft.compute_seconds})
        return draft, verdict

    def learn(self, tokens: Sequence[int]) -> None:
        self._inner.learn(tokens)


def _seconds(of: Draft | Verdict) -> dict[str, float]:
    return {"queue_seconds": of.queue_seconds, "compute_seconds": of.compute_seconds}


def _answered(span: Span, answer: asyncio.Future[Answer]) -> None:
    """Ends a round's span. A cancelled round counts as stale, whatever the verifier answered."""
    if answer.cancelled():
        span.note({"stale": True})
        return span.end()
    error = answer.exception()
    if error is not None:
        return span.end(type(error).__name__)
    verdict = answer.result().verdict
    span.note({"stale": verdict is None})
    if verdict:
        span.note({"accepted": verdict.accepted, **_seconds(verdict)})
    span.end()
