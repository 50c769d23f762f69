"""One stream of proposals: a drafter follows what its caller commits, and the newest draft is sent when it can be.

A draft that was not sent yet is replaced by a newer one, so a caller that reads slowly holds back nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Iterator

from tandem.services.verify_stream import Incoming
from tandem.speculation.drafters import Drafter
from tandem.speculation.follower import Followed, Follower
from tandem.speculation.reach import Plan
from tandem.v1 import draft_worker_pb2 as pb


class ProposalStream:
    """Follows the sequence that `first`, read at `arrived`, begins. `hear` checks and counts each later message.

    `drafter` is open. Nothing is drafted beyond `end` tokens, or more than `chunk` in a call.
    """

    def __init__(
        self,
        drafter: Drafter,
        first: pb.ProposeStreamRequest,
        arrived: float,
        end: int,
        chunk: int,
        hear: Callable[[pb.ProposeStreamRequest], None],
    ) -> None:
        self._hear = hear
        self._news = asyncio.Event()
        self._heard = {1: arrived}  # when messages were read, by number
        self._messages = 1
        self._error: Exception | None = None
        self._ended = False
        self._follower = Follower(drafter, first.tokens, _plan(first), end, chunk, self._news.set)

    async def replies(
        self, incoming: Incoming[pb.ProposeStreamRequest]
    ) -> AsyncGenerator[pb.ProposeStreamResponse, None]:
        """Yields drafts until the caller ends the stream. Leaving early ends the drafting at once."""
        tasks = [
            asyncio.create_task(self._hear_all(incoming), name="hear proposals"),
            asyncio.create_task(self._draft(), name="propose stream"),
        ]
        try:
            while True:
                await self._news.wait()
                self._news.clear()
                if self._error:
                    raise self._error
                if self._ended:
                    return
                if followed := self._follower.take():
                    yield self._reply(followed)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _reply(self, followed: Followed) -> pb.ProposeStreamResponse:
        heard = self._heard[followed.arrivals]
        self._heard = {number: at for number, at in self._heard.items() if number >= followed.arrivals}
        return pb.ProposeStreamResponse(
            base_length=followed.base,
            draft_tokens=followed.token_ids,
            proposed_by=[proposer.value for proposer in followed.proposed_by],
            drafted=followed.drafted,
            queue_seconds=followed.queue_seconds,
            compute_seconds=followed.compute_seconds,
            messages_read=followed.arrivals,
            server_seconds=time.perf_counter() - heard,
        )

    async def _hear_all(self, incoming: Incoming[pb.ProposeStreamRequest]) -> None:
        with self._ending():
            while (item := await incoming.next()) is not None:
                incoming.busy(False)  # the time without messages begins anew
                request, arrived = item
                self._hear(request)
                self._messages += 1
                self._heard[self._messages] = arrived
                self._follower.arrived(request.tokens, _plan(request))

    async def _draft(self) -> None:
        with self._ending():
            await self._follower.run()

    @contextlib.contextmanager
    def _ending(self) -> Iterator[None]:
        """Ends the stream with what is raised inside, or when it is left."""
        try:
            yield
        except Exception as error:
            self._error = self._error or error
        finally:
            self._ended = True
            self._news.set()


def _plan(request: pb.ProposeStreamRequest) -> Plan:
    return Plan(request.draft_ahead, request.send_first, request.send_more)
