"""Reuses keys and values for later sequences that begin with the same tokens.

Pages are copied out of a slot after its tokens are processed, and into a slot before the rest of a prompt. All steps
run in order on the device thread, so pages are complete when found and need no locks.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tandem.engine.compatibility import able
from tandem.host.cores import free_bytes
from tandem.runners.capabilities import PAGE, No, PageStore
from tandem.runners.protocol import PrefillRow, Runner

if TYPE_CHECKING:
    from tandem.engine.engine import Engine

log = logging.getLogger("tandem.engine")

SHARING = ("identity", "all", "off")
MIB = 2**20
LEAST_BYTES = 64 * MIB
SHARE = 16  # by default, kept prefixes take at most 1/SHARE of the free memory
ENTRY_BYTES = 1024  # for a page's tokens and tree node, rounded up

ScopeOf = Callable[[], Hashable]


@dataclass(frozen=True, slots=True)
class PrefixSharing:
    """Who shares prefixes: callers of one `identity`, `all`, or nobody (`off`). `megabytes`: MiB; None: own_bytes."""

    sharing: str = "identity"
    megabytes: int | None = None

    def __post_init__(self) -> None:
        if self.sharing not in SHARING:
            raise ValueError(f"prefix_sharing: {self.sharing!r} is not one of {', '.join(SHARING)}")
        if self.megabytes is not None and self.megabytes < 1:
            raise ValueError(f"prefix_cache_mb: {self.megabytes} is below 1; --prefix_sharing off needs no memory")


class PrefixCache:
    """One runner's pages, on the device thread. `queries` and `hits` count tokens of prompts, as in vLLM."""

    def __init__(self, runner: Runner, store: PageStore, pages: int, scope_of: ScopeOf = lambda: None) -> None:
        self._runner, self._store, self.scope_of = runner, store, scope_of
        self.tree = PrefixTree(pages)  # which prefixes are known, and in which pages
        self._bytes = cost(runner)
        self.queries = self.hits = 0

    def scope(self, adapter: int) -> Hashable:
        """The scope of the current request's prefixes; on the event loop."""
        return self.scope_of(), adapter

    @property
    def used_bytes(self) -> int:
        """Bytes of used pages; from any thread."""
        return len(self.tree) * self._bytes

    @property
    def limit_bytes(self) -> int:
        """Bytes of all pages; from any thread."""
        return self.tree.count * self._bytes

    def insert(self, scope: Hashable, tokens: Sequence[int], slot: int) -> None:
        """Copies whole pages of `tokens`, in `slot` from position 0, unless cached; removes them if that fails."""
        known, added = self.tree.extend(scope, tokens)
        if added:
            try:
                self._store.save(slot, known, added)
            except BaseException:
                self.tree.remove(scope, tokens)
                raise

    def copied(self, scope: Hashable, tokens: Sequence[int], row: PrefillRow, first: bool) -> int:
        """Copies cached pages of `tokens` to the row's slot; returns the number of tokens added."""
        pages, held = self.tree.match(scope, tokens), row.start // PAGE
        copied = max(0, len(pages) * PAGE - row.start)
        if copied:
            self._store.load(row.slot, held, pages[held:])
        self.queries += len(tokens) - row.start if first else 0
        self.hits += copied
        return copied


def cost(runner: Runner) -> int:
    """Bytes of a page with its entry; 0 if the runner cannot copy pages."""
    pages = able(runner).pages
    return 0 if isinstance(pages, No) else pages.bytes + ENTRY_BYTES


def page_counts(sharing: PrefixSharing, runners: Sequence[Runner]) -> list[int]:
    """Pages per runner, equal for all that can copy them; 0 for others, or if memory is too small."""
    costs = [cost(runner) for runner in runners]
    if sharing.sharing == "off" or not any(costs):
        return [0] * len(costs)
    each = (sharing.megabytes * MIB if sharing.megabytes else own_bytes(runners[0], sum(costs))) // sum(costs)
    return [each if bytes_of_page else 0 for bytes_of_page in costs]


def own_bytes(runner: Runner, page: int) -> int:
    """Returns the bytes of a sequence per slot, LEAST_BYTES to 1/SHARE of the free ones. `page`: bytes of a page."""
    free = free_bytes()
    if runner.identity.device != "cpu" or free is None:
        return LEAST_BYTES
    return max(LEAST_BYTES, min(runner.limits.slots * runner.limits.max_length // PAGE * page, free // SHARE))


async def share_prefixes(engines: Sequence[Engine], sharing: PrefixSharing, scope_of: ScopeOf) -> None:
    """Gives each engine a cache within their common memory, before there are sequences, and logs its size."""
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


Tokens = tuple[int, ...]
_Before = tuple[Hashable] | int  # a scope, or the page before


class PrefixTree:
    """The pages of token sequences per scope, numbered 0 to `count` - 1. Its length: pages in use.

    A page is found only after all pages before it, which count as used after it: the least recently used page always
    ends its branch.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.evicted = 0
        self._freed: list[int] = []
        self._pages: OrderedDict[tuple[_Before, Tokens], int] = OrderedDict()  # least recently used first

    def __len__(self) -> int:
        return len(self._pages)

    def match(self, scope: Hashable, tokens: Sequence[int]) -> list[int]:
        """The pages of the longest cached prefix, in order; marks them as used."""
        path = self._path(scope, tokens)
        self._use(path)
        return [self._pages[key] for key in path]

    def extend(self, scope: Hashable, tokens: Sequence[int]) -> tuple[int, list[int]]:
        """Adds whole pages of `tokens`, as far as others are free; returns how many existed, and those to be filled."""
        path = self._path(scope, tokens)
        known, added = len(path), list[int]()
        self._use(path)
        before: _Before = self._pages[path[-1]] if path else (scope,)
        for part in _parts(tokens[known * PAGE :]):
            page = self._page(len(path))
            if page is None:
                break
            path.append((before, part))
            self._pages[path[-1]] = before = page
            added.append(page)
        self._use(path)
        return known, added

    def remove(self, scope: Hashable, tokens: Sequence[int]) -> None:
        """Removes the first page of `tokens` and all pages after it, in any sequence."""
        leaving = self._path(scope, tokens)[:1]
        while leaving:
            page = self._drop(leaving.pop())
            leaving += [key for key in self._pages if key[0] == page]

    def _path(self, scope: Hashable, tokens: Sequence[int]) -> list[tuple[_Before, Tokens]]:
        path = list[tuple[_Before, Tokens]]()
        before: _Before = (scope,)
        for part in _parts(tokens):
            page = self._pages.get((before, part))
            if page is None:
                break
            path.append((before, part))
            before = page
        return path

    def _use(self, path: Sequence[tuple[_Before, Tokens]]) -> None:
        for key in reversed(path):
            self._pages.move_to_end(key)

    def _page(self, kept: int) -> int | None:
        """A free or least recently used page; None if only the last `kept` used are left."""
        used = len(self._pages)
        if not self._freed and used < self.count:
            return used  # none was freed, so these are the first ones
        if not self._freed and used > kept:
            self._drop(next(iter(self._pages)))
            self.evicted += 1
        return self._freed.pop() if self._freed else None

    def _drop(self, key: tuple[_Before, Tokens]) -> int:
        page = self._pages.pop(key)
        self._freed.append(page)
        return page


def _parts(tokens: Sequence[int]) -> Iterator[Tokens]:
    return (tuple(tokens[at : at + PAGE]) for at in range(0, len(tokens) - PAGE + 1, PAGE))
