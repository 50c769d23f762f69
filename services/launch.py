"""Runs a server role."""

from __future__ import annotations

import logging
from functools import partial

from tandem.engine.rank_processes import RankProcesses, rank_processes, run_follower
from tandem.services.role_config import RoleConfig
from tandem.services.roles import ROLES, ServerParts, ServerRole
from tandem.services.server import serve

log = logging.getLogger("tandem.server")


async def run_role(name: str, config: RoleConfig) -> int:
    """Runs a role of ROLES until its server ends; returns the exit code. Ranks above 0 follow rank 0."""
    role = ROLES[name]
    if not role.ranks:
        return await _run(role, config, RankProcesses())
    if config.models.ranks.follows:
        return await run_follower(config.models, drafts=role.drafts)
    with rank_processes(config.models.ranks, config.command) as others:
        return await _run(role, config, others)


async def _run(role: ServerRole, config: RoleConfig, others: RankProcesses) -> int:
    parts = ServerParts(role, config, others)
    serving = serve(config.serve, parts.lifecycle, partial(role.build, parts), [parts.observability.layer])
    code = await parts.observability.during(serving)
    for path in parts.profile.write() if parts.profile else ():
        log.info("performance metrics saved to %s", path)
    stuck = parts.batcher.stuck
    if stuck:  # the device thread would keep the process alive for ever
        config.serve.ending.within(0.0, "the device thread is stuck in a step")
    return code or int(stuck)
