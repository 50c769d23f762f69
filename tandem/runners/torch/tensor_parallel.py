"""One target on several processes, one for each core, started by rank 0 (tandem/engine/rank_processes.py) or torchrun.

transformers shards the target (`DistributedConfig`, DTensor): each process, a rank, holds its share of every layer's
heads and columns, and sums are made across ranks inside a step. A draft is whole on every rank: it is small, and a
graph of both needs it there. Rank 0 serves. Before each step it says to the others which one, with its rows; they make
the same step, so that collectives meet, and say nothing. Rows are all that is said: logits are whole on every rank, and
rank 0's draws are the ones that count.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from tandem.runners.protocol import (
    FusedResult,
    FusedRow,
    FusedStep,
    Fuses,
    Identity,
    Limits,
    PrefillRow,
    Proposal,
    ProposeRow,
    RowFailed,
    Runner,
    StepShapes,
    VerifyRow,
)
from tandem.runners.startup import Startup
from tandem.runners.torch.platforms import Platform
from tandem.speculation.types import Verdict

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

TARGET, DRAFT = 0, 1
_IDLE = timedelta(days=365)  # a server may have nothing to do for long; a rank that dies is noticed at once


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among the `degree` that share a target. `starts`: nobody else has started the others."""

    degree: int = 1
    rank: int = 0
    starts: bool = False

    @classmethod
    def from_environment(cls, degree: int, environment: Mapping[str, str] = os.environ) -> Ranks:
        """Raises ValueError where torchrun has started another number of processes."""
        if "WORLD_SIZE" not in environment:
            return cls(degree, starts=degree > 1)
        started = int(environment.get("WORLD_SIZE", "1"))
        if started != degree:
            raise ValueError(
                f"tp_degree: {degree} needs {degree} processes, and there {'is' if started == 1 else 'are'} {started}; "
                f"start them with: torchrun --nproc-per-node {degree} main.py ... --tp_degree {degree}, or without "
                "torchrun, and they are started here"
            )
        return cls(degree, int(environment.get("RANK", "0")))

    @property
    def follows(self) -> bool:
        return self.rank > 0


class RankLink:
    """From rank 0 to the others: a group of its own on the host, beside the devices' collectives."""

    def __init__(self, group: ProcessGroup | None = None) -> None:
        self._group = group

    @classmethod
    def join(cls, platform: Platform, ranks: Ranks) -> RankLink:
        """Waits for all ranks. Call it on the device thread. Raises ValueError."""
        import torch
        import torch.distributed as dist

        accelerator = torch.accelerator.current_accelerator()
        here = accelerator.type if accelerator else "cpu"
        if here != platform.device:
            raise ValueError(f"tp_degree: transformers shards on {here}, the accelerator here, not on {platform.name}")
        dist.init_process_group(platform.collectives)
        return cls(dist.new_group(backend="gloo", timeout=_IDLE))

    def part(self) -> None:
        """The end, on every rank at once."""
        import torch.distributed as dist

        dist.barrier(self._group)
        dist.destroy_process_group()

    def tell(self, message: object) -> None:
        self._broadcast([message])

    def hear(self) -> Any:
        return self._broadcast([None])

    def _broadcast(self, slot: list[object]) -> object:
        import torch.distributed as dist

        dist.broadcast_object_list(slot, src=0, group=self._group)
        return slot[0]

    def leave(self) -> None:
        """Rank 0's last word; the others then leave `follow`."""
        self.tell(None)
        self.part()


class Leader:
    """A runner on rank 0 whose steps all ranks make. `which` names it among those that they hold."""

    def __init__(self, runner: Runner, link: RankLink, which: int) -> None:
        self.runner, self.link, self._which = runner, link, which

    @property
    def limits(self) -> Limits:
        return self.runner.limits

    @property
    def identity(self) -> Identity:
        return self.runner.identity

    @property
    def shapes(self) -> StepShapes:
        return self.runner.shapes

    def warm_up(self, startup: Startup | None = None) -> None:
        """Every rank warms up of itself, by the same steps."""
        self.runner.warm_up(startup)

    def prefill(self, rows: Sequence[PrefillRow]) -> list[RowFailed | None]:
        self._tell("prefill", rows)
        return self.runner.prefill(rows)

    def verify(self, rows: Sequence[VerifyRow]) -> list[Verdict | RowFailed]:
        self._tell("verify", rows)
        return self.runner.verify(rows)

    def propose(self, rows: Sequence[ProposeRow]) -> list[Proposal | RowFailed]:
        self._tell("propose", rows)
        return self.runner.propose(rows)

    def fuse(self, draft: Runner, startup: Startup) -> None:
        """Every rank does."""
        if isinstance(self.runner, Fuses) and isinstance(draft, Leader):
            self.runner.fuse(draft.runner, startup)

    def fused_with(self, draft: Runner) -> FusedStep | None:
        step = self.runner.fused_with(draft.runner) if isinstance(draft, Leader) else None
        if step is None:
            return None

        def told(rows: Sequence[FusedRow]) -> list[FusedResult | RowFailed]:
            self._tell("fused", rows)
            return step(rows)

        return told

    def _tell(self, step: str, rows: Sequence[Any]) -> None:
        self.link.tell((self._which, step, tuple(rows)))


def follow(link: RankLink, runners: Sequence[Runner]) -> None:
    """Makes rank 0's steps until it leaves. `runners`: the target, and the draft where there is one.

    A step that fails here ends this process: rank 0 would wait for it in vain, and torchrun ends it too.
    """
    fused = runners[TARGET].fused_with(runners[DRAFT]) if len(runners) > 1 else None
    while (message := link.hear()) is not None:
        which, step, rows = message
        if step == "fused":
            assert fused is not None, "rank 0 has a fused step and this rank has none"
            fused(rows)
        else:
            getattr(runners[which], step)(rows)
    link.part()


def sharding(source: Mapping[str, object], degree: int) -> dict[str, object]:
    """What from_pretrained takes besides to load this rank's share.

    The input embedding stays whole: sharded, each rank's graph would be another, and none that Trainium's compiler is
    known to take. So does a head that is tied to it.
    """
    if degree == 1:
        return {}
    from transformers import AutoConfig
    from transformers.distributed import DistributedConfig

    tied = AutoConfig.from_pretrained(**source).tie_word_embeddings
    plan = {"model.embed_tokens": "replicate", **({"lm_head": "replicate"} if tied else {})}
    return {"distributed_config": DistributedConfig(tp_size=degree, tp_plan=plan)}
