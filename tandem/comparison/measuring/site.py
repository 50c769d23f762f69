"""The two sides of a comparison: the client's, where drafts may run, and the target's, across the link, if any."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

from tandem.comparison.links.link import DelayLink, Link
from tandem.comparison.links.netns import NetnsLink
from tandem.comparison.links.overhead import LinkOverhead
from tandem.comparison.measuring.conditions import LinkChoice
from tandem.comparison.measuring.config import ComparisonConfig


class LinkUnavailable(RuntimeError):
    """This machine cannot have the link; the message says why in one line."""


@dataclass(frozen=True, slots=True)
class Site:
    """Where servers of the target's side are started, and how the other side reaches them. No link: one machine."""

    link: Link | None = None

    @property
    def command_prefix(self) -> Sequence[str]:
        """Goes before the command of a server of the target's side."""
        return self.link.command_prefix if self.link else ()

    @property
    def host(self) -> str:
        """The host on which such a server listens."""
        return self.link.host if self.link else "127.0.0.1"

    @property
    def near_host(self) -> str:
        """Where a server of the client's side listens, so that the target's side can reach it."""
        return self.link.near_host if self.link else "127.0.0.1"

    async def across(self, address: str) -> str:
        """The address at which the other side reaches a server."""
        return await self.link.listen(address) if self.link else address

    async def set(self, choice: LinkChoice) -> None:
        settings = choice.settings
        if self.link and settings is not None and settings != self.link.settings:
            await self.link.set(settings)

    async def overhead(self) -> LinkOverhead:
        assert self.link is not None, "there is a link where one was set"
        return await self.link.overhead()


@contextlib.asynccontextmanager
async def open_site(config: ComparisonConfig) -> AsyncGenerator[Site, None]:
    """The site that a comparison's conditions need. Raises LinkUnavailable."""
    if all(condition.link.settings is None for condition in config.conditions):
        yield Site()
        return
    link = NetnsLink() if config.link == "netns" else DelayLink()
    async with contextlib.AsyncExitStack() as stack:
        try:
            await stack.enter_async_context(link)
        except ValueError as error:
            raise LinkUnavailable(str(error)) from error
        yield Site(link)
