"""Streams proposals without waiting: a draft is replaced by a newer one until it is sent."""

from __future__ import annotations

import time
from collections.abc import Callable

from tandem.services.duplex import Duplex, Incoming
from tandem.speculation.ahead import Follower
from tandem.speculation.drafters import Drafter
from tandem.speculation.lookahead import DraftPlan
from tandem.v1 import draft_worker_pb2 as pb


class ProposalStream(Duplex[pb.ProposeRequest, pb.ProposeResponse]):
    """Follows the sequence that `first` begins; drafts end at `end` tokens, `chunk` per call."""

    def __init__(
        self,
        drafter: Drafter,
        first: pb.ProposeRequest,
        arrived: float,
        end: int,
        chunk: int,
        check: Callable[[pb.ProposeRequest], None],
    ) -> None:
        super().__init__()
        self._check = check
        self._heard = {1: arrived}  # when messages were read, by number
        self._messages = 1
        self._follower = Follower(drafter, first.tokens, _plan(first), end, chunk, self.ready)

    def _hear(self, request: pb.ProposeRequest, arrived: float) -> None:
        self._check(request)
        self._messages += 1
        self._heard[self._messages] = arrived
        self._follower.arrived(request.tokens, _plan(request))

    async def _work(self, incoming: Incoming[pb.ProposeRequest]) -> None:
        await self._follower.run()

    def _next_reply(self) -> pb.ProposeResponse | None:
        followed = None if self.ended else self._follower.take()
        if followed is None:
            return None
        heard = self._heard[followed.arrivals]
        self._heard = {number: at for number, at in self._heard.items() if number >= followed.arrivals}
        return pb.ProposeResponse(
            base_length=followed.base,
            draft_tokens=followed.token_ids,
            proposed_by=[proposer.value for proposer in followed.proposed_by],
            drafted=followed.drafted,
            queue_seconds=followed.queue_seconds,
            compute_seconds=followed.compute_seconds,
            messages_read=followed.arrivals,
            server_seconds=time.perf_counter() - heard,
        )


def _plan(request: pb.ProposeRequest) -> DraftPlan:
    return DraftPlan(request.draft_ahead, request.send_first, request.send_more)
