"""Runs one target on several processes (ranks), one per core, started by rank 0 or torchrun.

transformers shards the target by heads and columns; collectives sum inside a step. Every rank has the whole draft,
which the pair's graph needs. Rank 0 serves and broadcasts each step's name and rows; the others run the same step.
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
from tandem.runners.torch.platforms import GLOO, Platform
from tandem.speculation.types import Verdict

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, ProcessGroupGloo

TARGET, DRAFT = 0, 1
_IDLE = timedelta(days=365)  # a server may be idle for long; a rank that dies is noticed at once


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process's rank among `degree`. `starts`: it starts the others."""

    degree: int = 1
    rank: int = 0
    starts: bool = False

    @classmethod
    def from_environment(cls, degree: int, environment: Mapping[str, str] = os.environ) -> Ranks:
        """Reads torchrun's variables. Raises ValueError for another number of processes."""
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
        """Whether this process repeats rank 0's steps."""
        return self.rank > 0


class RankLink:
    """Broadcasts rank 0's messages on a host group, separate from device collectives."""

    def __init__(self, group: ProcessGroup | None = None) -> None:
        self._group = group

    @classmethod
    def join(cls, platform: Platform, ranks: Ranks) -> RankLink:
        """Waits for all ranks; on the device thread. Raises ValueError if accelerators differ."""
        import torch
        import torch.distributed as dist

        accelerator = torch.accelerator.current_accelerator()
        here = accelerator.type if accelerator else "cpu"
        if here != platform.device:
            raise ValueError(f"tp_degree: transformers shards on {here}, the accelerator here, not on {platform.name}")
        if not hasattr(dist.Backend, GLOO.upper()):
            dist.Backend.register_backend(GLOO, _gloo_of_one_thread, extended_api=True, devices=["cpu"])
        dist.init_process_group(platform.collectives)
        return cls(dist.new_group(backend=GLOO, timeout=_IDLE))

    def part(self) -> None:
        """Waits for all ranks and destroys the process group."""
        import torch.distributed as dist

        dist.barrier(self._group)
        dist.destroy_process_group()

    def tell(self, message: object) -> None:
        """Broadcasts a message; on rank 0."""
        self._broadcast([message])

    def hear(self) -> Any:
        return self._broadcast([None])

    def _broadcast(self, slot: list[object]) -> object:
        import torch.distributed as dist

        dist.broadcast_object_list(slot, src=0, group=self._group)
        return slot[0]

    def leave(self) -> None:
        """Ends `follow` on the other ranks."""
        self.tell(None)
        self.part()


def _gloo_of_one_thread(group: Any, _: object) -> ProcessGroupGloo:
    # torch gives a group two threads, which write the name of the last completed collective without a lock: on a
    # busy host one writes into what the other has freed (seen with torch 2.13)
    from torch.distributed import ProcessGroupGloo as Gloo

    options: Any = Gloo._Options()  # type: ignore[attr-defined]
    names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    options._devices = [Gloo.create_device(interface=name) for name in names] or [Gloo.create_default_device()]
    options._timeout, options._threads = group.timeout, 1
    return Gloo(group.store, group.group_rank, group.group_size, options)


class Leader:
    """Rank 0's runner, whose steps all ranks run. `which`: TARGET or DRAFT."""

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
        fuse = self.runner.capabilities.fuse
        if isinstance(draft, Leader) and not isinstance(fuse, No):
            fuse(draft.runner, startup)

    def fused_with(self, draft: Runner) -> FusedStep | None:
        step = self.runner.fused_with(draft.runner) if isinstance(draft, Leader) else None
        if step is None:
            return None

        def run(rows: Sequence[FusedRow]) -> list[FusedResult | RowFailed]:
            self._tell("fused", rows)
            return step(rows)

        return run

    def _tell(self, step: str, rows: Sequence[Any]) -> None:
        self.link.tell((self._which, step, tuple(rows)))


def follow(link: RankLink, runners: Sequence[Runner]) -> None:
    """Repeats rank 0's steps with `runners` (target, draft) until it leaves; a failed step ends this process."""
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
    # the input embedding and a tied head stay whole, or every rank would compile another graph
    if degree == 1:
        return {}
    from transformers import AutoConfig
    from transformers.distributed import DistributedConfig

    tied = AutoConfig.from_pretrained(**source).tie_word_embeddings
    plan = {"model.embed_tokens": "replicate", **({"lm_head": "replicate"} if tied else {})}
    return {"distributed_config": DistributedConfig(tp_size=degree, tp_plan=plan)}
