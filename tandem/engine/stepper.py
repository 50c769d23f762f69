"""Steppers make all decoding rows: the device's thread as each step ends, or the event loop where the device waits.

Decoding rows and prompts' chunks may share a step; chunks have at most CHUNKS_AT_ONCE whole ones' tokens together.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tandem.engine.prefix_cache import PrefixCache
from tandem.runners.protocol import CHUNKS_AT_ONCE, PrefillRow, RowFailed, Runner, VerifyRow
from tandem.speculation.types import Verdict

Step = Callable[[Sequence[Any]], Sequence[Any]]
Feed = Callable[[Sequence[PrefillRow]], Sequence[Any]]
MOST_AHEAD = 16  # rows of a sequence that may begin before the event loop reads the first result


class Stepper:
    """Makes the rows of one sequence, for the same `step`; one thread at a time."""

    def __init__(self, step: Step, tokens: Sequence[int]) -> None:
        self.step, self.tokens = step, tokens  # tokens: those that the next row extends
        self.unread = deque[tuple[Any, "asyncio.Future[Any]"]]()  # rows and results, oldest first
        self.error: Exception | None = None  # why no further row could be made
        self.self_paced = False  # whether the device may begin the next row before the event loop reads the last result
        self.rests = False  # whether the text has ended, or its client must act before the next row
        self._open = True

    @property
    def gone(self) -> bool:
        """Whether steps of others need not wait for its next row."""
        return self._open and self.rests

    @property
    def notifies_each_step(self) -> bool:
        """Whether the event loop reads each result at once."""
        return False

    def follow(self, row: Any, result: Any) -> None:
        """Takes the result of a row that did not fail, on the device's thread."""

    def next_row(self) -> Any:
        """Returns the next row; None if the event loop must act first."""
        raise NotImplementedError

    def begun(self, row: VerifyRow, verdict: Verdict) -> tuple[Any, Any]:
        """Returns a first row, which ran in the step of its prompt's last chunk, and the result, as of `step`."""
        return row, verdict

    def after(self, row: Any, result: Any) -> Any:
        """Returns the row after `row`, on the device's thread; None if the event loop must make it."""
        try:
            if self._open and not isinstance(result, Exception):
                self.follow(row, result)
                if self.self_paced and len(self.unread) < MOST_AHEAD:
                    return self.next_row()
        except Exception as error:
            self.error = error  # the event loop raises it, in its request
        return None

    def end(self) -> None:
        """Drops unread rows; the device stops after the running step."""
        self._open = False
        while self.unread:
            self.unread.popleft()[1].cancel()


@dataclass(slots=True)
class Waiting:
    """A row that waits for its step, and its result."""

    step: Step
    row: Any
    limit: int
    since: float
    prefill: bool
    done: asyncio.Future[Any]
    stepper: Stepper | None = None
    size: int = 1  # counts against `limit`


def next_rows(rows: Sequence[Waiting], results: Sequence[Any], loop: asyncio.AbstractEventLoop) -> list[Waiting]:
    """Returns the rows that the steppers make from the results, on the device's thread."""
    now, made = time.perf_counter(), list[Waiting]()
    for old, result in zip(rows, results, strict=True):
        if old.stepper and (row := old.stepper.after(old.row, result)) is not None:
            new = Waiting(old.step, row, old.limit, now, False, asyncio.Future(loop=loop), old.stepper)
            old.stepper.unread.append((row, new.done))
            made.append(new)
    return made


@dataclass(frozen=True, slots=True)
class CachedPrompt:
    """A PrefillRow's whole prompt, and its scope in the prefix cache."""

    scope: Hashable
    tokens: tuple[int, ...]
    invalid: bool  # cached pages are dropped first
    first: bool  # no earlier step processed them


class SharedSteps:
    """The steps of one runner. `able`: it has shared steps. `prompts`: the step of chunks."""

    def __init__(self, runner: Runner, able: bool, prefixes: Callable[[], PrefixCache | None]) -> None:
        self._runner, self.able, self._prefixes = runner, able, prefixes
        self.prompts: Step = functools.partial(self._run, None)

    def room(self, row: Any, prefill: bool) -> tuple[int, int]:
        """A step's capacity, and the row's use of it: decoding rows, or tokens of chunks."""
        limits = self._runner.limits
        if not prefill:
            return limits.slots, 1
        if self.able and isinstance(row, PrefillRow):
            return CHUNKS_AT_ONCE * limits.chunk, len(row.tokens)
        return 1, 1

    def with_prefill_rows(self, decode: Step) -> Step:
        """A step that is `decode`, with chunks of prompts after its rows if the runner can."""
        if not self.able:
            return decode
        self.prompts = functools.partial(self._run, decode)
        return self.prompts

    def _run(self, decode: Step | None, rows: Sequence[Any]) -> Sequence[Any]:
        # chunks are last; cached pages are copied first
        decoding = [row for row in rows if not isinstance(row, PrefillRow)]
        chunks, decoded, prefixes = rows[len(decoding) :], list[Any](), self._prefixes()
        if decode and not chunks:
            return decode(rows)

        def feed(left: Sequence[PrefillRow]) -> Sequence[Any]:
            if not decode or not (decoding or any(row.then for row in left)):
                return self._runner.prefill(left) if left else []
            results = decode([*decoding, *left])
            decoded.extend(results[: len(decoding)])
            return results[len(decoding) :]

        filled = prefill(prefixes, chunks, self._runner.limits.chunk, feed)  # fills `decoded`
        return [*decoded, *filled]


def prefill(prefixes: PrefixCache | None, rows: Sequence[PrefillRow], chunk: int, feed: Feed) -> list[Any]:
    """Copies each row's cached pages, then feeds the next chunks; returns numbers of tokens copied, and verdicts."""
    rest = [_rest(prefixes, row, chunk) for row in rows] if prefixes else rows
    results = iter(feed([row for row in rest if row.tokens or row.then]))
    found = list[tuple[int, Verdict | None] | RowFailed]()
    for row, left in zip(rows, rest, strict=True):
        result = next(results) if left.tokens or left.then else None
        if prefixes and not isinstance(result, RowFailed):
            prefixes.insert(row.prompt.scope, row.prompt.tokens[: left.start + len(left.tokens)], row.slot)
        found.append(result if isinstance(result, RowFailed) else (left.start - row.start, result))
    return found


def _rest(prefixes: PrefixCache, row: PrefillRow, chunk: int) -> PrefillRow:
    """Copies the prompt's cached pages; returns a row of the next chunk, possibly empty, its last one `then`."""
    prompt: CachedPrompt = row.prompt
    if prompt.invalid:
        prefixes.tree.remove(prompt.scope, prompt.tokens)
    start = row.start + prefixes.copied(prompt.scope, prompt.tokens, row, prompt.first)
    then = row.then if start + chunk >= len(prompt.tokens) else None
    return replace(row, start=start, tokens=prompt.tokens[start : start + chunk], then=then)
