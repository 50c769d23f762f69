"""The requests of gateways under way, which they may abort."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterable, Iterator

from tandem.services.generation import Generations


class Requests:
    """The requests under way, by the id that their caller chose."""

    def __init__(self) -> None:
        self._under_way: dict[str, list[Generations]] = defaultdict(list)

    @contextlib.contextmanager
    def one(self, request_id: str, generations: Generations) -> Iterator[None]:
        """Registers the request, so that `abort` can cancel it while the block runs."""
        self._under_way[request_id].append(generations)
        try:
            yield
        finally:
            self._under_way[request_id].remove(generations)
            if not self._under_way[request_id]:
                del self._under_way[request_id]

    def abort(self, request_ids: Iterable[str]) -> None:
        """Ends requests by id. Ids that are not known are ignored: those requests have ended."""
        for request_id in request_ids:
            for each in self._under_way.get(request_id, ()):
                each.abort()
