"""Compiles structures for a tokenizer, with llguidance in processes that can be killed (docs/security.md)."""

from __future__ import annotations

import asyncio
import importlib.util
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar, runtime_checkable

from tandem.engine.fair_turns import FairTurns
from tandem.engine.structure_process import TRIES, Died, RemoteMatcher, StructureProcess, StructureRefused, refusal
from tandem.speculation.processing import Matcher
from tandem.speculation.sampling import InvalidField, Structure

KEPT = 16  # compiled structures, the last used ones, each in a process
KEPT_BYTES = 256 * 2**20  # limit of their memory, except the last used one's
COMPILING = 2  # at a time, one per caller
FOLLOWING = 2  # threads besides those that compile
WAITING = 256  # requests of a caller
OUTCOMES = ("compiled", "refused", "time", "memory", "cancelled")  # of a compilation
Result = TypeVar("Result")


@runtime_checkable
class Spelled(Protocol):
    end_of_sequence_ids: tuple[int, ...]

    def spelling(self) -> str | Sequence[bytes]:
        """A `tokenizers` JSON, or each token's bytes, b"" for special ones."""


class Structures:
    """Makes a tokenizer's matchers. `end_ids`: besides the tokenizer's. `outcomes`: counts by OUTCOMES."""

    def __init__(self, tokenizer: object, vocab_size: int, end_ids: Sequence[int] = ()) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        own = tokenizer.end_of_sequence_ids if isinstance(tokenizer, Spelled) else ()
        self._end_ids = tuple(token for token in dict.fromkeys((*own, *end_ids)) if token < vocab_size)
        self.kept: OrderedDict[Structure, tuple[StructureProcess, int]] = OrderedDict()
        self.compiling: dict[tuple[Hashable, Structure], asyncio.Task[StructureProcess]] = {}
        self._waiting = Counter[tuple[Hashable, Structure]]()  # requests for each
        self._starting: asyncio.Task[StructureProcess] | None = None
        self.turns = FairTurns("their structure to be compiled", COMPILING, WAITING)
        self._threads = ThreadPoolExecutor(COMPILING + FOLLOWING, "structures")
        self.outcomes = Counter[str](dict.fromkeys(OUTCOMES, 0))

    async def matcher(self, structure: Structure, output: Sequence[int] = ()) -> Matcher:
        """A matcher after `output`. Raises InvalidField if that does not match; see `check`."""
        for attempt in range(TRIES):
            compiled = await self.check(structure)
            try:
                matcher = RemoteMatcher(structure, compiled, self._vocab_size)
                if output and await self._blocking(matcher.stop, matcher.take, output) < len(output):
                    raise InvalidField("prefix", "the output in it does not match the structure")
                return matcher
            except Died as died:
                self.kept.pop(structure, None)
                if attempt == TRIES - 1 or died.late:
                    raise refusal(structure, died, "follow") from None
            except StructureRefused as error:
                raise refusal(structure, error, "follow") from None
        raise AssertionError("the last try returns or raises")

    async def check(self, structure: Structure) -> StructureProcess:
        """Compiles and keeps a structure. Raises InvalidField if it cannot be enforced, and TooManyWaiting."""
        # a caller's requests for a structure share one compilation
        if structure in self.kept:
            self.kept.move_to_end(structure)
            return self.kept[structure][0]
        key = self.turns.caller(), structure
        if key not in self.compiling:
            self.compiling[key] = asyncio.create_task(self._compile(structure), name="structure")
        self._waiting[key] += 1
        try:
            return await asyncio.shield(self.compiling[key])
        finally:
            self._waiting[key] -= 1
            if not self._waiting[key]:
                del self._waiting[key]
                self.compiling.pop(key).cancel()

    async def _compile(self, structure: Structure) -> StructureProcess:
        outcome = "refused"
        try:
            async with self.turns.turn():
                process, size = await self._tried(structure)
            outcome = "compiled"
        except asyncio.CancelledError:
            outcome = "cancelled"
            raise
        except Died as died:
            outcome = "time" if died.late else "memory"
            raise refusal(structure, died, "compile") from None
        except StructureRefused as error:
            raise refusal(structure, error, "compile") from None
        finally:
            self.outcomes[outcome] += 1
        self.kept[structure] = process, size
        while len(self.kept) > KEPT or (len(self.kept) > 1 and sum(n for _, n in self.kept.values()) > KEPT_BYTES):
            self.kept.popitem(last=False)
        return process

    async def _tried(self, structure: Structure) -> tuple[StructureProcess, int]:
        for attempt in range(TRIES):
            starting = self._starting
            try:
                process = (await self._first()).fork()
                starting = None
                kind, text = structure.kind.value, structure.text
                return process, await self._blocking(process.stop, process.compile, kind, text)
            except Died as died:
                if attempt == TRIES - 1 or died.late:
                    raise
                if starting:  # the first is gone
                    self._starting = None
        raise AssertionError("the last try returns or raises")

    async def _first(self) -> StructureProcess:
        starting = self._starting
        if starting is None or (starting.done() and (starting.cancelled() or starting.exception())):
            starting = self._starting = asyncio.create_task(self._started(), name="structures")
        return await asyncio.shield(starting)

    async def _started(self) -> StructureProcess:
        if importlib.util.find_spec("llguidance") is None:
            raise InvalidField(
                "structure", "not available: this server lacks llguidance, of tandem-speculative[structured]"
            )
        if not isinstance(self._tokenizer, Spelled):
            raise InvalidField("structure", "this server does not know how its tokens are spelled")
        if not self._end_ids:
            raise InvalidField("structure", "this model has no end-of-sequence token to end the output with")
        try:
            return await self._blocking(lambda: None, self._start, self._tokenizer)
        except (StructureRefused, Died) as error:
            raise InvalidField("structure", f"not available: {error}") from None

    async def _blocking(self, stop: Callable[[], None], function: Callable[..., Result], *args: object) -> Result:
        """Runs a function that blocks, in a thread; `stop` ends it if this is cancelled."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, function, *args)
        except asyncio.CancelledError:
            stop()
            raise

    def _start(self, tokenizer: Spelled) -> StructureProcess:
        spelling = tokenizer.spelling()
        return StructureProcess.started(
            {
                "spelling": spelling if isinstance(spelling, str) else [token.hex() for token in spelling],
                "vocab_size": self._vocab_size,
                "end_ids": self._end_ids,
            }
        )
