"""Runs the choices of one request side by side, and ends them early if the request is aborted."""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence

from tandem.speculation.types import Chunk, GenerationEnd

Event = Chunk | GenerationEnd
Start = Callable[[], AsyncGenerator[Event, None]]


class Choices:
    """The choices of one request, as one stream of (choice, event). After `abort`, the stream ends."""

    def __init__(self, starts: Sequence[Start]) -> None:
        self._starts = starts
        self._events: asyncio.Queue[tuple[int, Event | Exception] | None] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []

    async def events(self) -> AsyncGenerator[tuple[int, Event], None]:
        """Yields what the choices yield, until all have ended. If one raises, ends the others and raises that."""
        self._tasks = [asyncio.create_task(self._run(i, start)) for i, start in enumerate(self._starts)]
        running = len(self._tasks)
        try:
            while running and (event := await self._events.get()) is not None:
                choice, what = event
                if isinstance(what, Exception):
                    raise what
                yield choice, what
                running -= isinstance(what, GenerationEnd)
        finally:
            self._cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def abort(self) -> None:
        """Ends the choices now: their slots are free before the next step begins."""
        self._cancel()
        self._events.put_nowait(None)

    def _cancel(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _run(self, choice: int, start: Start) -> None:
        try:
            async with contextlib.aclosing(start()) as events:
                async for event in events:
                    self._events.put_nowait((choice, event))
        except Exception as error:
            self._events.put_nowait((choice, error))


class Requests:
    """The requests under way, by the id that their caller chose."""

    def __init__(self) -> None:
        self._under_way: dict[str, list[Choices]] = defaultdict(list)

    @contextlib.contextmanager
    def one(self, request_id: str, choices: Choices) -> Iterator[None]:
        """Lets `abort` find the request while the block runs."""
        self._under_way[request_id].append(choices)
        try:
            yield
        finally:
            self._under_way[request_id].remove(choices)
            if not self._under_way[request_id]:
                del self._under_way[request_id]

    def abort(self, request_ids: Iterable[str]) -> None:
        """Ends requests. An unknown id is one that has ended."""
        for request_id in request_ids:
            for choices in self._under_way.get(request_id, ()):
                choices.abort()
