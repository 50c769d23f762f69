"""Places servers on the two sides of a comparison: the client side, and the target side across the link."""

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
    """The link cannot be emulated on this machine; the message says why in one line."""


@dataclass(frozen=True, slots=True)
class Site:
    """Where servers on the target side start, and how the client side reaches them. Without a link: one machine."""

    link: Link | None = None

    @property
    def command_prefix(self) -> Sequence[str]:
        """The prefix of the command of a server on the target side."""
        return self.link.command_prefix if self.link else ()

    @property
    def host(self) -> str:
        """The host on which such a server listens."""
        return self.link.host if self.link else "127.0.0.1"

    @property
    def near_host(self) -> str:
        """The host on which a server on the client side listens, so that the target side can reach it."""
        return self.link.near_host if self.link else "127.0.0.1"

    async def across(self, address: str) -> str:
        """Returns the address at which the other side reaches a server."""
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
    """Opens the site that the conditions of a comparison need. Raises LinkUnavailable."""
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
