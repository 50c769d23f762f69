"""Reuses the keys and values of prompts and answers for later sequences that begin with the same tokens.

Pages are copied out of a slot once its tokens are processed, and into a slot before the rest of a prompt is. So a row
never depends on a page that another sequence may replace. All of this runs on the device thread, in steps that run one
after the other: nothing here is locked, and a page is complete before anybody can find it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tandem.engine.compatibility import able
from tandem.engine.prefix_tree import PrefixTree
from tandem.runners.capabilities import No
from tandem.runners.pages import PAGE, PageStore
from tandem.runners.protocol import PrefillRow, Runner

if TYPE_CHECKING:
    from tandem.engine.engine import Engine

log = logging.getLogger("tandem.engine")

SHARING = ("identity", "all", "off")
DEFAULT_MB = 64
MIB = 2**20
ENTRY_BYTES = 1024
"""Memory for a page's tokens and its place in the tree, rounded up."""

ScopeOf = Callable[[], Hashable]


@dataclass(frozen=True, slots=True)
class PrefixSharing:
    """Who shares prefixes: callers of one `identity`, `all`, or nobody (`off`); in `megabytes` (MiB) of memory."""

    sharing: str = "identity"
    megabytes: int = DEFAULT_MB

    def __post_init__(self) -> None:
        if self.sharing not in SHARING:
            raise ValueError(f"prefix_sharing: {self.sharing!r} is not one of {', '.join(SHARING)}")
        if self.megabytes < 1:
            raise ValueError(f"prefix_cache_mb: {self.megabytes} is below 1; --prefix_sharing off needs no memory")


class PrefixCache:
    """The pages of one runner's sequences. `scope_of` returns the scope of the current request's prefixes.

    `queries` and `hits` count tokens of prompts, as vLLM does: all that were looked up, and those that were copied.
    Whatever is not documented otherwise is called on the device thread alone.
    """

    def __init__(self, runner: Runner, store: PageStore, pages: int, scope_of: ScopeOf = lambda: None) -> None:
        self._runner, self._store, self.scope_of = runner, store, scope_of
        self.tree = PrefixTree(pages)  # which prefixes are known, and in which pages
        self._bytes = cost(runner)
        self.queries = self.hits = 0

    def scope(self, adapter: int) -> Hashable:
        """Returns the scope in which a sequence of the current request finds and leaves prefixes; on the event loop."""
        return self.scope_of(), adapter

    @property
    def used_bytes(self) -> int:
        """Bytes of the pages in use; any thread may ask."""
        return len(self.tree) * self._bytes

    @property
    def limit_bytes(self) -> int:
        """Bytes of all pages; any thread may ask."""
        return self.tree.count * self._bytes

    def copy(self, scope: Hashable, tokens: Sequence[int], rows: Sequence[PrefillRow]) -> list[int]:
        """Copies what is known of `tokens` beyond the row's start to its slot. A step for the batcher, of one row."""
        (row,) = rows
        return [self.copied(scope, tokens, row, first=True)]

    def insert(self, scope: Hashable, tokens: Sequence[int], slot: int) -> None:
        """Copies the whole pages of `tokens`, which `slot` holds from position 0, unless they are known.

        If the copy fails, the tokens are forgotten, so that no later sequence finds a page that was not filled.
        """
        known, added = self.tree.extend(scope, tokens)
        if added:
            try:
                self._store.save(slot, known, added)
            except BaseException:
                self.tree.remove(scope, tokens)
                raise

    def copied(self, scope: Hashable, tokens: Sequence[int], row: PrefillRow, first: bool) -> int:
        """Copies the known pages of `tokens` to the row's slot; returns how many tokens that adds to it."""
        pages, held = self.tree.match(scope, tokens), row.start // PAGE
        copied = max(0, len(pages) * PAGE - row.start)
        if copied:
            self._store.load(row.slot, held, pages[held:])
        self.queries += len(tokens) - row.start if first else 0
        self.hits += copied
        return copied


def cost(runner: Runner) -> int:
    """Returns the bytes that a page of the runner takes, with its entry; 0 if the runner cannot copy pages."""
    pages = able(runner).pages
    return 0 if isinstance(pages, No) else pages.bytes + ENTRY_BYTES


def page_counts(sharing: PrefixSharing, runners: Sequence[Runner]) -> list[int]:
    """Returns how many pages each runner gets: all that can copy them get as many, so that each knows the same tokens.

    0 if it cannot, or if the memory is too small for a page.
    """
    costs = [cost(runner) for runner in runners]
    if sharing.sharing == "off" or not any(costs):
        return [0] * len(costs)
    each = sharing.megabytes * MIB // sum(costs)
    return [each if bytes_of_page else 0 for bytes_of_page in costs]


async def share_prefixes(engines: Sequence[Engine], sharing: PrefixSharing, scope_of: ScopeOf) -> None:
    """Gives each engine the cache of its prefixes, within the memory of all, and logs what is kept.

    Call it before the engines have sequences. With sharing among `all`, `scope_of` is not asked.
    """
    if sharing.sharing == "off":
        return
    for engine, pages in zip(engines, page_counts(sharing, [engine.runner for engine in engines]), strict=True):
        name, copies = engine.runner.identity.model_name, able(engine.runner).pages
        if isinstance(copies, No) or not pages:
            why = copies if isinstance(copies, No) else "prefix_cache_mb is less than a page takes"
            log.info("prefixes of %s are not kept: %s", name, why)
            continue
        store = await engine.batcher.on_device(copies.store, pages)
        scope = scope_of if sharing.sharing == "identity" else lambda: None
        engine.prefixes = PrefixCache(engine.runner, store, pages, scope)
        size, whose = engine.prefixes.limit_bytes / MIB, _WHOSE[sharing.sharing]
        log.info("prefixes of %s: up to %d tokens in %.1f MiB, %s", name, pages * PAGE, size, whose)


_WHOSE = {"identity": "found by callers of the same identity", "all": "found by all callers"}
