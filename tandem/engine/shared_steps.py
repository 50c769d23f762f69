"""Makes steps that chunks of several prompts share, and share with the rows that decode, if the runner can.

A step takes as many chunks as have a whole one's tokens together. So a row that decodes waits no longer for them than
for a chunk of one prompt in a step of its own.
"""

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
class Prompt:
    """The `tokens` that a PrefillRow has a chunk of, and the scope in which they are looked up.

    `invalid`: what is known of them is dropped first. `first`: no earlier step processed them.
    """

    scope: Hashable
    tokens: tuple[int, ...]
    invalid: bool
    first: bool


class SharedSteps:
    """The steps of one runner. `able`: whether it has shared steps (tandem/runners/capabilities.py).

    `prompts`: the step of prompts' chunks, which takes other rows too if it is also what `beside_prompts` returned.
    """

    def __init__(self, runner: Runner, able: bool, prefixes: Callable[[], PrefixCache | None]) -> None:
        self._runner, self._able, self._prefixes = runner, able, prefixes
        self.prompts: Step = functools.partial(self._run, None)

    def room(self, row: Any, prefill: bool) -> tuple[int, int]:
        """Returns what a step has room for, and the row takes of it: rows that decode, or tokens of a whole chunk."""
        limits = self._runner.limits
        if not prefill:
            return limits.slots, 1
        return limits.chunk, len(row.tokens) if self._able and isinstance(row, PrefillRow) else limits.chunk

    def beside_prompts(self, decode: Step) -> Step:
        """Returns a step that is `decode`, from now on with chunks of prompts after its rows if the runner can."""
        if not self._able:
            return decode
        self.prompts = functools.partial(self._run, decode)
        return self.prompts

    def _run(self, decode: Step | None, rows: Sequence[Any]) -> Sequence[Any]:
        """Runs one step: chunks are the last of the rows, and what is known of their prompts is copied before."""
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
    """Copies what is known of each row's prompt beyond its start to its slot; `feed` processes the next chunks.

    Returns how many tokens it copied for each.
    """
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
    """Copies what is known of the row's prompt; returns a row of the next chunk after it, which may be empty."""
    prompt: Prompt = row.prompt
    if prompt.invalid:
        prefixes.tree.remove(prompt.scope, prompt.tokens)
    start = row.start + prefixes.copied(prompt.scope, prompt.tokens, row, prompt.first)
    return replace(row, start=start, tokens=prompt.tokens[start : start + chunk])
