"""Runs a rank that does not serve: it loads rank 0's models and runs its steps."""

from __future__ import annotations

import logging
import signal

from tandem.engine.batcher import Batcher
from tandem.engine.loading import load, load_pair
from tandem.engine.model_config import ModelConfig
from tandem.engine.rank_processes import end_with_rank_0
from tandem.runners.torch.tensor_parallel import Leader, follow

log = logging.getLogger("tandem.engine")


async def run_follower(config: ModelConfig, drafts: bool) -> int:
    """Follows rank 0 until it stops; returns the exit code. Raises ValueError."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    end_with_rank_0()
    batcher = Batcher("follower")
    try:
        target, draft = await load_pair(config, batcher) if drafts else (await load(config, batcher), None)
        leaders = [loaded.runner for loaded in (target, draft) if loaded is not None]
        runners = [leader.runner for leader in leaders if isinstance(leader, Leader)]
        assert isinstance(target.runner, Leader)
        log.info("rank %d follows", config.ranks.rank)
        await batcher.on_device(follow, target.runner.link, runners)
    except ValueError:
        raise
    except Exception:
        log.exception("rank %d failed", config.ranks.rank)
        return 1
    finally:
        await batcher.close()
    return 0
