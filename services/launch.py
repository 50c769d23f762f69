"""Runs a server role to its exit code."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from tandem.engine.rank_follower import run_follower
from tandem.engine.rank_processes import RankProcesses, rank_processes
from tandem.services.layers import Layer
from tandem.services.lifecycle import Lifecycle
from tandem.services.role_config import RoleConfig
from tandem.services.roles import ROLES, ServerParts, ServerRole
from tandem.services.server import HostedService, ServeConfig, serve

log = logging.getLogger("tandem.server")

Build = Callable[[], Awaitable[HostedService]]
Host = Callable[[ServeConfig, Lifecycle, Build, Sequence[Layer]], Awaitable[int]]
"""Serves what `Build` returns, to an exit code: our own gRPC server, or Ray Serve (workshops/ray_serve/replica.py)."""


async def run_role(name: str, config: RoleConfig, host: Host = serve) -> int:
    """Runs the role (a name in ROLES) until its server ends. A rank above 0 follows rank 0 instead of serving."""
    role = ROLES[name]
    if not role.ranks:
        return await _run(role, config, host, RankProcesses())
    if config.models.ranks.follows:
        return await run_follower(config.models, drafts=role.drafts)
    with rank_processes(config.models.ranks, config.command) as others:
        return await _run(role, config, host, others)


async def _run(role: ServerRole, config: RoleConfig, host: Host, others: RankProcesses) -> int:
    parts = ServerParts(role, config, others)
    serving = host(config.serve, parts.lifecycle, partial(role.build, parts), [parts.observability.layer])
    code = await parts.observability.during(serving)
    for path in parts.profile.write() if parts.profile else ():
        log.info("performance metrics saved to %s", path)
    stuck = parts.batcher.stuck
    if stuck:  # the device thread would keep the process alive for ever
        config.serve.ending.within(0.0, "the device thread is stuck in a step")
    return code or int(stuck)
