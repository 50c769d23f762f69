"""Counts the disk and the host memory that a planned pair takes: checkpoints, their copies, and what is read to load.

NxD Inference reads a whole checkpoint into memory before it divides it (application_base.py, checkpoint_loader_fn), and
with `save_sharded_checkpoint` writes every core's share. FP8 of the hub is rescaled into a copy first (--role convert).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tandem.workshops.planning.placement import Pair, Placement
from tandem.workshops.planning.shapes import DecoderShape
from tandem.workshops.planning.sharding import Route, Weights, weight_bytes

SYSTEM = 100 * 10**9
"""Bytes of disk for the image, packages and compiled graphs. Assumed."""
LEAST_VOLUME = 512 * 10**9
"""Bytes; AWS's least for the root volume of such an instance (its page on updating a DLAMI, SDK 2.33)."""


@dataclass(frozen=True, slots=True)
class Storage:
    """Bytes of disk by what they are for, and of host memory while the larger placement loads.

    `host`: the instance's memory; None where AWS has published none.
    """

    checkpoints: int
    converted: int
    shares: int
    loading: int
    host: int | None

    @property
    def disk(self) -> int:
        return max(self.checkpoints + self.converted + self.shares + SYSTEM, LEAST_VOLUME)


def storage_of(pair: Pair, placements: Sequence[Placement]) -> Storage:
    """What the placements that fit need; those of one instance run in turn, so the larger counts for memory."""
    target = _checkpoint(pair.target, pair.target_weights)
    draft = _checkpoint(pair.draft, pair.draft_weights) if pair.draft and pair.draft_weights else 0
    sharded = pair.route is Route.NXDI
    stored = Weights(pair.target_weights.bytes_each, pair.target.converted)
    source = _checkpoint(pair.target, stored)
    shares = [sum(p.core.weights * p.cores for p in placement.processes) for placement in placements]
    return Storage(
        checkpoints=source + draft,
        converted=target if sharded and pair.target_weights.eight_bit else 0,
        shares=sum(shares) if sharded else 0,
        loading=target + draft if sharded else max(shares, default=0),
        host=pair.instance.host_bytes,
    )


def storage_lines(storage: Storage) -> Iterator[str]:
    """Storage in words, one line each for disk and memory."""
    parts = [f"{_gb(storage.checkpoints)} GB of checkpoints"]
    parts += [f"{_gb(storage.converted)} of a converted copy"] if storage.converted else []
    parts += [f"{_gb(storage.shares)} of the cores' shares"] if storage.shares else []
    parts.append(f"{_gb(SYSTEM)} of system and graphs (assumed)")
    least = "; AWS asks for no less" if storage.disk == LEAST_VOLUME else ""
    yield f"Disk: {_gb(storage.disk)} GB: {', '.join(parts)}{least}."
    said = f"Host memory: {_gb(storage.loading)} GB of weights while it loads, beside the compiler's and the system's"
    if storage.host is None:
        yield f"{said}."
    elif storage.loading > storage.host:
        yield f"{said}: more than its {storage.host / 2**30:.0f} GiB. Compile on a larger instance (--artifacts)."
    else:
        yield f"{said}, of the instance's {storage.host / 2**30:.0f} GiB."


def _checkpoint(shape: DecoderShape, weights: Weights) -> int:
    return weight_bytes(shape, 1, Route.TORCHNEURON, weights)


def _gb(count: int) -> str:
    return f"{count / 1e9:,.0f}" if count >= 10e9 else f"{count / 1e9:.1f}"
