"""Runs one target on several processes, one per core, started by rank 0 (tandem/engine/rank_processes.py) or torchrun.

transformers shards the target (`DistributedConfig`, DTensor): each process, a rank, holds its share of every layer's
heads and columns, and collectives sum across ranks inside a step. Every rank holds the whole draft: it is small, and a
graph of both needs it. Rank 0 serves. Before each step it broadcasts the step's name and rows; the other ranks run the
same step, so that collectives match, and reply nothing. Logits are whole on every rank, and only rank 0's draws count.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from tandem.runners.capabilities import Capabilities, No, Trait
from tandem.runners.protocol import (
    FusedResult,
    FusedRow,
    FusedStep,
    Limits,
    PrefillRow,
    Proposal,
    ProposeRow,
    RowFailed,
    Runner,
    RunnerIdentity,
    StepShapes,
    VerifyRow,
)
from tandem.runners.startup import Startup
from tandem.runners.torch.platforms import Platform
from tandem.speculation.types import Verdict

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

TARGET, DRAFT = 0, 1
_IDLE = timedelta(days=365)  # a server may be idle for long; a rank that dies is noticed at once


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process's rank among the `degree` that share a target. `starts`: it must start the others itself."""

    degree: int = 1
    rank: int = 0
    starts: bool = False

    @classmethod
    def from_environment(cls, degree: int, environment: Mapping[str, str] = os.environ) -> Ranks:
        """Reads torchrun's variables. Raises ValueError if torchrun started another number of processes."""
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
        """Whether this process repeats rank 0's steps instead of serving."""
        return self.rank > 0


class RankLink:
    """Broadcasts messages from rank 0 on a host group of its own, separate from the devices' collectives."""

    def __init__(self, group: ProcessGroup | None = None) -> None:
        self._group = group

    @classmethod
    def join(cls, platform: Platform, ranks: Ranks) -> RankLink:
        """Waits for all ranks to join; on the device thread. Raises ValueError if the accelerator is another."""
        import torch
        import torch.distributed as dist

        accelerator = torch.accelerator.current_accelerator()
        here = accelerator.type if accelerator else "cpu"
        if here != platform.device:
            raise ValueError(f"tp_degree: transformers shards on {here}, the accelerator here, not on {platform.name}")
        dist.init_process_group(platform.collectives)
        return cls(dist.new_group(backend="gloo", timeout=_IDLE))

    def part(self) -> None:
        """Waits for all ranks and destroys the process group."""
        import torch.distributed as dist

        dist.barrier(self._group)
        dist.destroy_process_group()

    def tell(self, message: object) -> None:
        """Broadcasts a message; on rank 0."""
        self._broadcast([message])

    def hear(self) -> Any:
        """Waits for rank 0's next message; on the other ranks."""
        return self._broadcast([None])

    def _broadcast(self, slot: list[object]) -> object:
        import torch.distributed as dist

        dist.broadcast_object_list(slot, src=0, group=self._group)
        return slot[0]

    def leave(self) -> None:
        """Ends `follow` on the other ranks; on rank 0."""
        self.tell(None)
        self.part()


class Leader:
    """Wraps rank 0's runner; all ranks run its steps. `which`: TARGET or DRAFT."""

    def __init__(self, runner: Runner, link: RankLink, which: int) -> None:
        self.runner, self.link, self._which = runner, link, which

    @property
    def limits(self) -> Limits:
        return self.runner.limits

    @property
    def identity(self) -> RunnerIdentity:
        return self.runner.identity

    @property
    def shapes(self) -> StepShapes:
        return self.runner.shapes

    @property
    def capabilities(self) -> Capabilities:
        own = self.runner.capabilities
        fuse = own.fuse if isinstance(own.fuse, No) else self.fuse
        return replace(own, traits=own.traits | {Trait.SHARED}, fuse=fuse)

    def warm_up(self, startup: Startup | None = None) -> None:
        """Warms up; every rank runs the same steps by itself."""
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
        """Makes the pair's graph; every rank does so by itself."""
        fuse = self.runner.capabilities.fuse
        if isinstance(draft, Leader) and not isinstance(fuse, No):
            fuse(draft.runner, startup)

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
    """Repeats rank 0's steps until it leaves. `runners`: the target, and the draft if there is one.

    A step that fails here ends this process: rank 0 would otherwise wait for it forever.
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
    """from_pretrained's additional arguments to load this rank's share of the model.

    The input embedding stays whole, and so does a head tied to it: if it were sharded, each rank would compile another
    graph, of a kind that Trainium's compiler is not known to accept.
    """
    if degree == 1:
        return {}
    from transformers import AutoConfig
    from transformers.distributed import DistributedConfig

    tied = AutoConfig.from_pretrained(**source).tie_word_embeddings
    plan = {"model.embed_tokens": "replicate", **({"lm_head": "replicate"} if tied else {})}
    return {"distributed_config": DistributedConfig(tp_size=degree, tp_plan=plan)}
