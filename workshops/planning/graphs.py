"""Counts the graphs that a role compiles, and reads bucket lists."""

from __future__ import annotations

import math

from tandem.workshops.planning.memory import Load
from tandem.workshops.planning.sharding import Route


def graphs_of(role: str, load: Load, route: Route) -> int:
    """Graphs of a `target`, a `draft`, a `fused` pair, or a target with its EAGLE `head`.

    NxD Inference: one per context bucket and one per decode bucket, whatever the role (a pair is one model there).
    Tandem's own steps where nothing but graphs may run (tandem/runners/torch/graph_model.py, fused_graph.py): a prefill
    each; a verification per row bucket; greedy and sampled proposals per row and draft bucket, and two steps of the
    draft's logits per row bucket; a fused pair has all of them and its own per row and draft bucket. An EAGLE head has
    the graphs of a draft (tandem/runners/eagle/graph_runner.py), and none with its target.
    """
    if route is Route.NXDI:
        return len(load.context_buckets) + len(load.decode_buckets)
    rows = len({*(load.row_buckets or (1,)), load.batch})
    lengths = len({*load.draft_buckets, load.drafts})
    target, draft = 1 + rows, 1 + rows * (2 * lengths + 2)
    both = target + draft
    return {"target": target, "draft": draft, "fused": both + rows * lengths, "head": both}[role]


def automatic(longest: int) -> tuple[int, ...]:
    """NxD Inference's default buckets (modules/autobucketing.py): powers of two from 128, and the longest."""
    return (*(2**i for i in range(7, round(math.log2(longest)))), longest)


def bucket_list(flag: str, given: str | None, longest: int) -> tuple[int, ...]:
    """A comma-separated list, ascending and up to `longest`; None is the longest alone. Raises ValueError."""
    if given is None:
        return (longest,)
    if given == "auto":
        return automatic(longest)
    try:
        buckets = tuple(int(part) for part in given.split(","))
    except ValueError:
        raise ValueError(f"{flag}: {given!r} is neither a list of lengths such as 1024,2048 nor auto") from None
    if list(buckets) != sorted(set(buckets)) or buckets[0] < 1:
        raise ValueError(f"{flag}: {given} does not ascend from a positive length")
    if buckets[-1] > longest:
        raise ValueError(f"{flag}: {buckets[-1]} is above sequence_length {longest}")
    return buckets
