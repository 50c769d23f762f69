"""Implements --role compile: compiles a server's graphs into a shared folder, without running them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tandem.checkpoints.locate import Checkpoint, find
from tandem.engine.compatibility import excluded
from tandem.engine.model_config import ModelConfig
from tandem.engine.rank_processes import end_with_rank_0, rank_processes
from tandem.runners.backends import backend_named
from tandem.runners.capabilities import Trait
from tandem.runners.load_runner import load_runner, prepared_platform
from tandem.runners.startup import Startup
from tandem.runners.torch.graph_runner import GraphRunner
from tandem.runners.torch.platforms import Platform
from tandem.runners.torch.tensor_parallel import RankLink

PARTS = ("target", "draft", "fused")
GRAPHS = ("inductor", "neuron")


def checked_parts(parts: tuple[str, ...], models: ModelConfig) -> tuple[str, ...]:
    """Returns `parts`. Raises ValueError, one line."""
    for part in parts:
        if part not in PARTS:
            raise ValueError(f"compile_for: {part!r} is not one of {', '.join(PARTS)}")
    if models.backend == "toy":
        raise ValueError("backend: toy has no graphs to compile")
    return parts


def run_compile(models: ModelConfig, parts: tuple[str, ...], command: tuple[str, ...]) -> int:
    """Compiles `parts` (none: all that the models allow) and prints a line about each. Raises ValueError, one line."""
    head = _head(models)
    wanted = _selected(models, parts, head)
    if models.backend != "torch":
        return _compile_by_backend(models, wanted)
    platform = prepared_platform(models.execution)
    execution = models.execution
    compiler = platform.compilers[0]
    if compiler not in GRAPHS:
        raise ValueError(f"device: {platform.name} has no graphs to compile; name the device of the servers")
    if execution.compile == "auto":
        execution = replace(execution, compile=compiler)
    if execution.compile not in GRAPHS:
        raise ValueError(f"compile: {execution.compile} compiles no graphs; leave it out, or use {compiler}")
    models = replace(models, execution=execution)
    if models.ranks.follows:
        end_with_rank_0()
    with rank_processes(models.ranks, command) as others:
        link = RankLink.join(platform, models.ranks) if models.ranks.degree > 1 else None
        for line in _made(models, platform, wanted, head):
            if not models.ranks.follows:
                print(line, flush=True)
        if link is not None:
            link.part()
        others.serve(lambda: None)
    return 0


def _head(models: ModelConfig) -> Checkpoint | None:
    draft = models.draft_model
    checkpoint = find(draft) if draft and models.backend == "torch" else None
    return checkpoint if checkpoint and backend_named("torch").is_head(checkpoint) else None


def _selected(models: ModelConfig, parts: tuple[str, ...], head: Checkpoint | None) -> tuple[str, ...]:
    """The parts to compile, in order. Raises ValueError if a draft model is missing."""
    if models.draft_model is None:
        if set(parts) - {"target"}:
            raise ValueError("draft_model: name the draft model to compile")
        return ("target",)
    if head is not None:
        if models.execution.tp_degree > 1:
            raise excluded("draft", "an EAGLE head's target", Trait.SHARED, "features_out")
        if "draft" in parts:
            raise ValueError("compile_for: an EAGLE head drafts beside its target alone; compile fused")
        return parts or ("fused",)
    return tuple(part for part in PARTS if part in parts or not parts)


def _compile_by_backend(models: ModelConfig, wanted: tuple[str, ...]) -> int:
    backend, startup = backend_named(models.backend), Startup()
    backend.require()
    if models.adapters and "fused" in wanted and backend.fuses(models.load_request()):
        raise ValueError("adapters: a fused graph takes none; use --compile_for target or --pair apart")
    target = backend.find(models.model)
    draft = backend.find(models.draft_model) if models.draft_model else None
    for part in wanted:
        for line in backend.compile(target, draft, models.load_request(), part):
            print(f"{part}: {line}", flush=True)
    print(f"ready after {startup.total():.1f} s", flush=True)
    return 0


def _made(models: ModelConfig, platform: Platform, wanted: tuple[str, ...], head: Checkpoint | None) -> Iterator[str]:
    startup = Startup()
    yield from _with_head(models, wanted, head, startup) if head else _of_models(models, wanted, startup)
    yield f"{platform.kept(models.execution.compiled)}: ready after {startup.total():.1f} s ({startup.line()})"


def _of_models(models: ModelConfig, wanted: tuple[str, ...], startup: Startup) -> Iterator[str]:
    runners = {}
    for part, model in (("target", models.model), ("draft", models.draft_model)):
        if part in wanted or "fused" in wanted:
            runner = load_runner(find(model), models.execution, models.shape, part == "target", startup=startup)
            assert isinstance(runner, GraphRunner)
            made = runner.compile(startup)
            yield _line(f"{part} {runner.identity.model_name}", runner.model.graph_names, made)
            runners[part] = runner
    if "fused" in wanted:
        graph, made = runners["target"].compile_fused(runners["draft"], startup)
        yield _line("fused", [f"fused-{batch}x{k}" for batch, k in graph.shapes], made)


def _with_head(models: ModelConfig, wanted: tuple[str, ...], head: Checkpoint, startup: Startup) -> Iterator[str]:
    from tandem.runners.eagle.eagle_runner import EagleRunner

    backend, request = backend_named("torch"), models.load_request()
    if "target" in wanted:
        yield from _of_models(models, ("target",), startup)
    if "fused" not in wanted:
        return
    target = backend.load(backend.find(models.model), replace(request, head=head), startup)
    assert isinstance(target, GraphRunner)
    made = target.compile(startup)
    yield _line(f"target {target.identity.model_name} beside its head", target.model.graph_names, made)
    drafting = backend.load_head(head, target, request, startup)
    assert isinstance(drafting, EagleRunner) and drafting.graphs
    made = drafting.graphs.compile(startup)
    yield _line(f"head {drafting.identity.model_name}", drafting.graphs.graph_names, made)


def _line(what: str, names: list[str], made: str) -> str:
    return f"{what}: {made}; {', '.join(names)}"
