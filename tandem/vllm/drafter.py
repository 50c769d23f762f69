"""vLLM's drafter class: answers each step within its budget."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from numpy.typing import NDArray

from tandem.clients.background_loop import BackgroundLoop
from tandem.vllm.counts import DrafterCounts, Exporter, serve_metrics
from tandem.vllm.delivery import DraftDelivery
from tandem.vllm.drafter_settings import Settings, settings_of
from tandem.vllm.rows import Row, RowMatcher
from tandem.vllm.workers import RowWorker, RowWorkers, target_of

log = logging.getLogger("tandem.vllm")

IDLE_SECONDS = 3.0  # without a step, all rows have left: vLLM does not report ends
_LOOK_SECONDS = 0.5  # between checks of idleness and failed workers


class RemoteDrafter:
    """The custom_class of vLLM 0.32. `settings` None: the environment's. Raises InvalidField at start only."""

    def __init__(self, vllm_config: Any, settings: Settings | None = None) -> None:
        self.settings = settings or settings_of(os.environ)
        self.target = target_of(vllm_config, self.settings.tokenizer_sha256)
        self.counts = DrafterCounts()
        self._table, self._lock = RowMatcher(), threading.Lock()
        self._ended = time.monotonic()
        parallel = vllm_config.parallel_config
        # Every rank of a tensor-parallel group makes a drafter, and vLLM reads the drafts of the first.
        self._idle_rank = parallel.rank % parallel.tensor_parallel_size != 0
        if self._idle_rank:
            return
        self._loop = BackgroundLoop("tandem drafts")
        try:
            self._workers, self._delivery = self._loop.run(self._connect())
            self._stop_metrics = self._serve_metrics()
        except BaseException:
            self._loop.close(asyncio.sleep(0))
            raise
        log.info("drafts come from %s, within %g ms", ", ".join(self.settings.workers), self.settings.budget_ms)

    def load_model(self, *given: Any, **named: Any) -> None:
        """Does nothing; vLLM's CPU runner calls it."""

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: Sequence[int],
        token_ids_cpu: NDArray[Any],
        **unused: Any,
    ) -> list[list[int]]:
        """Returns the rows' drafts, perhaps empty, within the budget. Raises nothing."""
        if self._idle_rank:
            return [[] for _ in sampled_token_ids]
        began = time.monotonic()
        try:
            with self._lock:
                return self._drafts(sampled_token_ids, num_tokens_no_spec, token_ids_cpu, began)
        except Exception:  # a mistake of ours must not end the engine, which serves without drafts
            if not self.counts.get("errors"):
                log.exception("the drafter made a mistake; steps like this one go undrafted")
            self.counts.add("errors")
            self._table = RowMatcher()
            return [[] for _ in sampled_token_ids]

    def close(self) -> None:
        if not self._idle_rank:
            self._stop_metrics()
            self._delivery.end(self._table.clear())
            self._loop.close(self._disconnect())

    def _drafts(
        self, sampled: Sequence[Sequence[int]], lengths: Sequence[int], token_ids: NDArray[Any], began: float
    ) -> list[list[int]]:
        places, gone = self._table.follow(sampled, lengths, token_ids)
        self._delivery.end(gone)
        rows = [row for row in places if row is not None]
        self._count_accepted(rows)
        arrivals = self._delivery.begin([row for row in rows if self._room(row) > 0])
        waiting = time.monotonic()
        in_time = arrivals.wait(began + self.settings.budget_ms / 1000 - waiting)
        self.counts.add("wait_seconds", amount=time.monotonic() - waiting)
        self.counts.add("steps")
        self.counts.add("late_steps", amount=not in_time)
        drafts = [[] if row is None else self._draft(row) for row in places]
        self._ended = time.monotonic()
        return drafts

    def _count_accepted(self, rows: Sequence[Row]) -> None:
        for row in rows:
            if row.offered:
                accepted = min(row.offered, len(row.tokens) - row.drafted_at - 1)
                self.counts.add("accepted_tokens", row.source, accepted)

    def _room(self, row: Row) -> int:
        # The target adds a token of its own.
        return min(self.target.max_speculation_length, self.target.max_sequence_length - len(row.tokens) - 1)

    def _draft(self, row: Row) -> list[int]:
        room = max(0, self._room(row))
        late = row.held.base < len(row.tokens)
        drafted = row.draft(room)
        row.source = ("late" if late else "arrived") if drafted else "none"
        row.offered, row.drafted_at = len(drafted), len(row.tokens)
        self.counts.add("rows", row.source)
        if drafted:
            self.counts.add("draft_tokens", row.source, len(drafted))
        return list(drafted)

    def _serve_metrics(self) -> Callable[[], None]:
        if self.settings.metrics_port is None:
            return lambda: None
        return serve_metrics(Exporter(self.counts, self._workers.states), self.settings.metrics_port)

    async def _connect(self) -> tuple[RowWorkers, DraftDelivery]:
        workers = RowWorkers([RowWorker(address, self.target, self.settings) for address in self.settings.workers])
        delivery = DraftDelivery(
            workers, self.target.max_speculation_length, self.settings.budget_ms / 1000, self._loop.soon
        )
        self._looking = asyncio.create_task(self._look(workers), name="look after drafts")
        return workers, delivery

    async def _disconnect(self) -> None:
        self._looking.cancel()
        await self._delivery.close()
        for worker in self._workers.all:
            await worker.close()

    async def _look(self, workers: RowWorkers) -> None:
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            if self._lock.acquire(blocking=False):  # otherwise a step is under way, and it is not idle
                try:
                    if time.monotonic() - self._ended > IDLE_SECONDS:
                        self._delivery.end(self._table.clear())
                finally:
                    self._lock.release()
            await asyncio.gather(*(worker.try_again() for worker in workers.all), return_exceptions=True)
