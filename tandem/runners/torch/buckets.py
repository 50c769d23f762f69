"""The shapes that graphs are compiled for."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.runners.protocol import Limits
from tandem.runners.torch.platforms import Platform


@dataclass(frozen=True, slots=True)
class Buckets:
    """Rows per step, tokens per row of a verification and of a prefill step, draft tokens (ascending)."""

    batches: tuple[int, ...]
    width: int
    chunk: int
    drafts: tuple[int, ...]

    def batch(self, rows: int) -> int:
        return next(b for b in self.batches if b >= rows)

    def draft(self, k: int) -> int:
        return next(d for d in self.drafts if d >= k)


def buckets_for(
    platform: Platform, limits: Limits, batch_buckets: tuple[int, ...] = (), draft_buckets: tuple[int, ...] = ()
) -> Buckets:
    """A platform's buckets, with the user's batches and drafts if given. Raises ValueError above the limits."""
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
