"""Every architecture over toy models, by name: the one table that tests of all of them share."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

from tandem.speculation.types import ModelInfo
from tandem.speculation.verification_mode import Pipeline
from tests.support import (
    HANG,
    Generate,
    Site,
    distributed,
    draft_config,
    fused_site,
    remote_draft,
    target_site,
    toy,
    worker_site,
)
from tests.toy import ToyRunner, toy_config
from tests.toy_head import ToyHead

WAITING = ("autoregressive", "fused", "draft_worker", "draft_role", "pipelined", "remote_draft")
NEVER_WAITING = ("never_waiting", "remote_run", "chosen")
ARCHITECTURES = (*WAITING, *NEVER_WAITING)
PLACES = {
    "autoregressive": ("target", Pipeline.OFF),
    "fused": ("fused", Pipeline.OFF),
    "draft_worker": ("draft_worker", Pipeline.OFF),
    "pipelined_worker": ("draft_worker", Pipeline.ON),
    "running_worker": ("draft_worker", Pipeline.NEVER_WAITING),
    "choosing_worker": ("draft_worker", Pipeline.AUTO),
    "draft_role": ("draft_role", Pipeline.OFF),
    "pipelined": ("draft_role", Pipeline.ON),
    "never_waiting": ("draft_role", Pipeline.NEVER_WAITING),
    "chosen": ("draft_role", Pipeline.AUTO),
    "remote_draft": ("remote_draft", Pipeline.OFF),
    "remote_run": ("remote_draft", Pipeline.NEVER_WAITING),
    "remote_chosen": ("remote_draft", Pipeline.AUTO),
}
"""Who drafts, and how the target waits for it."""


@dataclass(frozen=True)
class Served:
    """How to generate, the description of the model, and the server that is asked if there is one."""

    generate: Generate
    info: ModelInfo
    site: Site | None = None


@contextlib.asynccontextmanager
async def serving(
    architecture: str,
    draft: str | None = "salt=0",
    kind: str = "",
    slots: int = 4,
    k: int | None = 3,
    draft_length: int = 160,
    features: bool = False,
    target: ToyRunner | None = None,
) -> AsyncIterator[Served]:
    """An architecture in this process. `draft`: the toy model's parameters, None: n-gram lookup.

    `kind`: of drafts, as `--draft` names it. `k` None: lengths adapt. `features`: the target hands out hidden states.
    """
    where, pipeline = PLACES[architecture]
    target = target or toy(slots=slots)
    choice = {"kind": "ngram"} if draft is None else {"kind": kind or "model", "model": draft}
    config = draft_config(None, slots, draft_length, k, **choice)
    async with contextlib.AsyncExitStack() as stack:
        if where == "fused":
            drafter = None if draft is None else _drafter(draft, target, slots, draft_length)
            site = await stack.enter_async_context(fused_site(target, drafter, k, kind or "model"))
        elif where == "remote_draft":
            worker = await stack.enter_async_context(worker_site(None, config=config))
            remote = remote_draft(worker.address, target, HANG, k=k, pipeline=pipeline)
            generator, _ = await stack.enter_async_context(remote)
            yield Served(generator.generate, generator.info)
            return
        else:
            site = await stack.enter_async_context(target_site(target, features=() if features else None))
        if where == "draft_role":
            loop = distributed(site.address, config=config, pipeline=pipeline)
            role, _ = await stack.enter_async_context(loop)
            yield Served(role.generate, role.info)
            return
        if where == "draft_worker":
            site = await stack.enter_async_context(worker_site(site.address, config=config, pipeline=pipeline))
        client = await stack.enter_async_context(site.client())
        yield Served(client.generate, await client.model_info(), site)


def _drafter(draft: str, target: ToyRunner, slots: int, length: int) -> ToyRunner:
    config = toy_config(draft)
    return ToyHead(target.limits, config, target) if config.head else toy(config, slots, length)
