"""Places draft and target, fused and distributed, on the same number of cores, so that a comparison is fair."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tandem.host.instances import Instance
from tandem.workshops.planning.graphs import graphs_of
from tandem.workshops.planning.head_shape import HeadShape
from tandem.workshops.planning.memory import BATCHES, MOST_ROWS, Core, Load, Part, core_of, largest
from tandem.workshops.planning.shapes import DecoderShape
from tandem.workshops.planning.sharding import Degree, Route, Weights, degrees, padding_remark


@dataclass(frozen=True, slots=True)
class Pair:
    """A target, its draft if any, how their weights are stored, and the instance that runs them."""

    instance: Instance
    lnc: int
    route: Route
    load: Load
    target: DecoderShape
    target_weights: Weights
    draft: DecoderShape | None = None
    draft_weights: Weights | None = None

    @property
    def capacity(self) -> int:
        return self.instance.core_bytes(self.lnc)

    @property
    def head(self) -> bool:
        """Whether the draft is an EAGLE-3 head, which runs in its target's process, and one process alone."""
        return isinstance(self.draft, HeadShape)

    def allowed(self, shape: DecoderShape, cores: int) -> list[Degree]:
        found = degrees(shape, self.instance.chip, cores, self.route)
        return [degree for degree in found if not degree.refused]


@dataclass(frozen=True, slots=True)
class Process:
    """A server process: its cores, what one of them holds, its graphs, and its largest loads.

    `loads`: (rows, longest sequence) pairs. `most_rows`: for the requested length.
    """

    role: str
    cores: int
    degrees: tuple[int, ...]
    core: Core
    graphs: int
    most_rows: int
    loads: tuple[tuple[int, int], ...]
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Placement:
    """An architecture on `cores` cores. If it does not fit it has no processes, and `why` has the reason."""

    architecture: str
    cores: int
    processes: tuple[Process, ...]
    why: str = ""

    @property
    def fits(self) -> bool:
        return bool(self.processes)

    @property
    def idle(self) -> int:
        return self.cores - sum(process.cores for process in self.processes) if self.processes else 0


def process_of(pair: Pair, role: str, degree: int) -> Process:
    """The process of a role on `degree` cores, whether it fits or not."""
    parts, remarks = parts_of(pair, role, degree)
    graphs = graphs_of("head" if pair.head and role == "fused" else role, pair.load, pair.route)

    def held(load: Load) -> Core:
        return core_of(parts, load, pair.route, graphs, pair.capacity)

    def longest(rows: int) -> int:
        """The longest sequence that fits with so many rows, a multiple of 128."""
        most = min(part.shape.longest for part in parts) // 128
        return 128 * largest(most, lambda blocks: held(load.resized(rows, 128 * blocks)).fits)

    load = pair.load
    core = held(load)
    loads = [(rows, longest(rows)) for rows in BATCHES] if core.fits else []
    return Process(
        role=role,
        cores=degree,
        degrees=tuple(part.degree for part in parts),
        core=core,
        graphs=graphs,
        most_rows=largest(MOST_ROWS, lambda rows: held(load.resized(rows, load.length)).fits) if core.fits else 0,
        loads=tuple((rows, length) for rows, length in loads if length),
        remarks=tuple(remark for remark in remarks if remark),
    )


def parts_of(pair: Pair, role: str, degree: int) -> tuple[list[Part], list[str]]:
    """The models of a role, and remarks.

    NxD Inference divides a fused draft like the target; Tandem's own runner repeats it on every core.
    """
    target = Part(pair.target, degree, pair.target_weights)
    if role == "target":
        return [target], []
    assert pair.draft is not None and pair.draft_weights is not None
    if role == "draft":
        return [Part(pair.draft, degree, pair.draft_weights)], []
    if pair.route is Route.NXDI:
        return [target, Part(pair.draft, degree, pair.draft_weights)], [padding_remark(pair.draft, degree)]
    remark = "the draft is repeated on every core" if degree > 1 else ""
    return [target, Part(pair.draft, 1, pair.draft_weights)], [remark]


def fused(pair: Pair, cores: int, degree: int | None = None) -> Placement:
    """The fused placement, at the widest allowed degree or at `degree`."""
    options = [d.degree for d in pair.allowed(pair.target, cores) if degree in (None, d.degree)]
    if pair.head and not (options := [option for option in options if option == 1]):
        return Placement("fused", cores, (), "processes that share a target serve no EAGLE head: tp_degree 1 alone")
    if not options:
        return Placement("fused", cores, (), f"no allowed degree for {pair.target.name} on {cores} cores")
    process = process_of(pair, "fused", options[-1])
    return Placement("fused", cores, (process,)) if process.core.fits else _full("fused", cores, process)


def distributed(pair: Pair, cores: int, degree: int | None = None) -> Placement:
    """The distributed placement: the widest target that leaves cores for a draft, and the narrowest draft."""
    assert pair.draft is not None
    last: Process | None = None
    for option in reversed(pair.allowed(pair.target, cores - 1)):
        if degree is not None and option.degree > degree:
            continue
        last = process_of(pair, "target", option.degree)
        if not last.core.fits:
            break  # narrower ones hold more
        for narrow in pair.allowed(pair.draft, cores - option.degree):
            draft = process_of(pair, "draft", narrow.degree)
            if draft.core.fits:
                return Placement("distributed", cores, (last, draft))
    if last is None:
        return Placement("distributed", cores, (), f"{_cores(cores)} cannot be shared by two processes")
    if last.core.fits:
        return Placement("distributed", cores, (), f"{pair.draft.name} does not fit on what is left")
    return _full("distributed", cores, last)


def _full(architecture: str, cores: int, process: Process) -> Placement:
    core = process.core
    why = (
        f"{process.role} at degree {process.cores} needs {core.total / 1e9:.1f} GB a core"
        f" ({core.weights / 1e9:.1f} GB of it weights); {core.usable / 1e9:.1f} GB are usable"
    )
    return Placement(architecture, cores, (), why)


def compared(pair: Pair, cores: int | None, degree: int | None) -> tuple[Placement, ...]:
    """Fused and distributed on `cores` cores; None: on the fewest that hold both, else on the fewest that hold fused.

    Without a draft: the target alone, on the fewest cores. With an EAGLE head: fused alone.
    """
    every = pair.instance.cores(pair.lnc)
    if pair.draft is None:
        return (_alone(pair, cores or degree or every, degree, smallest=cores is None and degree is None),)
    if pair.head:
        return (fused(pair, cores or degree or 1, degree),)
    if cores is not None or degree is not None:
        chosen = cores or degree or every
        return fused(pair, chosen, degree), distributed(pair, chosen, degree)
    sizes = [size for size in pair.instance.chip.degrees if size <= every]
    tried = [(fused(pair, size), distributed(pair, size)) for size in sizes]
    both = (pairs for pairs in tried if all(placement.fits for placement in pairs))
    one = (pairs for pairs in tried if pairs[0].fits)
    return next(both, None) or next(one, None) or tried[-1]


def _alone(pair: Pair, cores: int, degree: int | None, smallest: bool) -> Placement:
    options = [d.degree for d in pair.allowed(pair.target, cores) if degree in (None, d.degree)]
    found = [process_of(pair, "target", option) for option in options]
    fitting = [process for process in found if process.core.fits]
    if fitting:
        chosen = fitting[0] if smallest else fitting[-1]
        return Placement("autoregressive", chosen.cores if smallest else cores, (chosen,))
    if found:
        return _full("autoregressive", cores, found[-1])
    return Placement("autoregressive", cores, (), f"no allowed degree for {pair.target.name} on {cores} cores")


def pair_remark(pair: Pair, placements: tuple[Placement, ...]) -> Iterator[str]:
    """What a fused server on NxD Inference needs for sampled requests: its graph is greedy, so it loads both twice."""
    whole = placements[0]
    if pair.route is not Route.NXDI or whole.architecture != "fused" or not whole.fits:
        return
    core = whole.processes[0].core
    both = 2 * core.total
    said = f"With its models apart as well, for sampled requests, fused needs {both / 1e9:.2f} GB a core"
    if both <= core.usable:
        yield f"{said}, which fits (--pair both, the default)."
    else:
        yield f"{said}: too much. Use --pair fused (greedy requests alone) or --pair apart (no fused graph)."


def compile_budget(placements: tuple[Placement, ...], minutes: float) -> Iterator[str]:
    """The graphs to compile for each placement, and how long that takes at so many minutes a graph, one by one."""
    for placement in placements:
        if placement.fits:
            graphs = sum(process.graphs for process in placement.processes)
            hours = graphs * minutes / 60
            said = f"{graphs} graphs, {hours:.1f} hours at {minutes:g} minutes each (assumed: --compile_minutes)"
            yield f"To compile for {placement.architecture}: {said}. --role compile does it ahead."


def advice(pair: Pair, placements: tuple[Placement, ...]) -> Iterator[str]:
    """For each placement that does not fit: the reason, and how many cores or what else would be needed."""
    every = pair.instance.cores(pair.lnc)
    for placement in placements:
        if placement.fits:
            continue
        yield f"{placement.architecture}: {placement.why}."
        if placement.architecture == "distributed" and pair.draft is not None:
            yield _more_cores(pair, placement.cores, every)
        elif not any(process_of(pair, "target", d.degree).core.fits for d in pair.allowed(pair.target, every)):
            yield f"{pair.target.name} does not fit on a {pair.instance.name} at any allowed degree on this route."


def _more_cores(pair: Pair, cores: int, every: int) -> str:
    for option in pair.allowed(pair.target, every):
        target = process_of(pair, "target", option.degree)
        if target.core.fits:
            if cores < option.degree + 1 <= every:
                return (
                    f"distributed: fits on {option.degree + 1} cores, the target at degree {option.degree};"
                    f" --core_count {option.degree + 1} gives fused as many."
                )
            return (
                f"distributed: the target takes {_cores(option.degree)} by itself, so the draft needs cores elsewhere,"
                " on another instance or a host's CPU; say so beside such a comparison, fused uses fewer."
            )
    return "distributed: the target fits at no allowed degree of this instance."


def _cores(count: int) -> str:
    return "one core" if count == 1 else f"{count} cores"
