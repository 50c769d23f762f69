"""Chooses the shapes that graphs are compiled for: rows, tokens per row, draft tokens."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.runners.protocol import Limits
from tandem.runners.torch.platforms import Platform


@dataclass(frozen=True, slots=True)
class Buckets:
    """Shapes to compile graphs for.

    batches: rows per step. width: tokens per row of a verification, the same for all. chunk: tokens of a prefill step.
    drafts: draft tokens per step, ascending.
    """

    batches: tuple[int, ...]
    width: int
    chunk: int
    drafts: tuple[int, ...]

    def batch(self, rows: int) -> int:
        """The smallest batch that holds `rows` rows. Raises StopIteration if none does."""
        return next(b for b in self.batches if b >= rows)

    def draft(self, k: int) -> int:
        """The smallest number of draft tokens that is at least `k`. Raises StopIteration if there is none."""
        return next(d for d in self.drafts if d >= k)


def buckets_for(
    platform: Platform, limits: Limits, batch_buckets: tuple[int, ...] = (), draft_buckets: tuple[int, ...] = ()
) -> Buckets:
    """The buckets of a platform: few where compiling a graph takes minutes (CPU, Trainium), more on CUDA.

    `batch_buckets`, `draft_buckets`: those that the user chose instead, if any. Verification always has one width of at
    least 2, since a product of one row uses another kernel, with other bits. The full batch and the longest draft are
    always included. Raises ValueError if chosen ones exceed the limits.
    """
    slots, most = limits.slots, limits.max_draft
    batches, drafts = {1}, set[int]()
    if platform.every_bucket:
        batches, drafts = {2**i for i in range(10) if 2**i < slots}, set(range(1, most))
    if batch_buckets:
        batches = _within("batch_buckets", batch_buckets, "batch", slots)
    if draft_buckets:
        drafts = _within("draft_buckets", draft_buckets, "max_speculation_length", most)
    return Buckets(
        tuple(sorted(batches | {slots})), max(2, most + 1), limits.chunk, tuple(sorted(drafts | {most})) if most else ()
    )


def _within(name: str, values: tuple[int, ...], limit: str, most: int) -> set[int]:
    for value in values:
        if not 1 <= value <= most:
            raise ValueError(f"{name}: {value} is outside 1 to {most}, the {limit}")
    return set(values)
