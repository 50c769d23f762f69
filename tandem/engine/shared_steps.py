"""Steps shared by decoding rows and by prompts' chunks, which have at most one whole chunk's tokens together."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tandem.engine.prefix_cache import PrefixCache
from tandem.engine.stepper import Step
from tandem.runners.protocol import PrefillRow, RowFailed, Runner

Feed = Callable[[Sequence[PrefillRow]], Sequence[RowFailed | None]]


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
        self._runner, self._able, self._prefixes = runner, able, prefixes
        self.prompts: Step = functools.partial(self._run, None)

    def room(self, row: Any, prefill: bool) -> tuple[int, int]:
        """A step's capacity, and the row's use of it: decoding rows, or tokens of a whole chunk."""
        limits = self._runner.limits
        if not prefill:
            return limits.slots, 1
        return limits.chunk, len(row.tokens) if self._able and isinstance(row, PrefillRow) else limits.chunk

    def with_prefill_rows(self, decode: Step) -> Step:
        """A step that is `decode`, with chunks of prompts after its rows if the runner can."""
        if not self._able:
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
            if not decode or not decoding:
                return self._runner.prefill(left) if left else []
            results = decode([*decoding, *left])
            decoded.extend(results[: len(decoding)])
            return results[len(decoding) :]

        filled = prefill(prefixes, chunks, self._runner.limits.chunk, feed) if prefixes else feed(chunks)
        return [*decoded, *filled]


def prefill(prefixes: PrefixCache, rows: Sequence[PrefillRow], chunk: int, feed: Feed) -> list[int | RowFailed]:
    """Copies each row's cached pages, then feeds the next chunks; returns the numbers of tokens copied."""
    rest = [_rest(prefixes, row, chunk) for row in rows]
    failures = iter(feed([row for row in rest if row.tokens]))
    found = list[int | RowFailed]()
    for row, left in zip(rows, rest, strict=True):
        failed = next(failures) if left.tokens else None
        if not failed:
            prefixes.insert(row.prompt.scope, row.prompt.tokens[: left.start + len(left.tokens)], row.slot)
        found.append(failed or left.start - row.start)
    return found


def _rest(prefixes: PrefixCache, row: PrefillRow, chunk: int) -> PrefillRow:
    """Copies the prompt's cached pages; returns a row of the next chunk, possibly empty."""
    prompt: CachedPrompt = row.prompt
    if prompt.invalid:
        prefixes.tree.remove(prompt.scope, prompt.tokens)
    start = row.start + prefixes.copied(prompt.scope, prompt.tokens, row, prompt.first)
    return replace(row, start=start, tokens=prompt.tokens[start : start + chunk])
