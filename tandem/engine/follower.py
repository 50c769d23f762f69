"""A process that shares a target and does not serve: it loads what rank 0 loads, and makes its steps."""

from __future__ import annotations

import logging
import signal

from tandem.engine.batcher import Batcher
from tandem.engine.loading import ModelConfig, load, load_pair
from tandem.engine.rank_processes import end_with_rank_0
from tandem.runners.torch.tensor_parallel import Leader, follow

log = logging.getLogger("tandem.models")


async def run_follower(config: ModelConfig, drafts: bool) -> int:
    """Until rank 0 stops; 1 where a step fails. `drafts`: rank 0 has a draft beside its target. Raises ValueErrors.

    SIGTERM and SIGINT are rank 0's to answer: requests that it lets finish still need this rank.
    """
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
        log.exception("rank %d cannot go on", config.ranks.rank)
        return 1
    finally:
        await batcher.close()
    return 0
