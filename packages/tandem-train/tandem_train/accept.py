"""Measures a pair for `--role accept`: generates with the target once, replays drafters against that, times steps.

A replay has a deployment's rounds, because the target's output does not depend on the draft.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.table import Table

from tandem.checkpoints.tokenizers import same_tokens
from tandem.comparison.measuring.workloads import Prompt
from tandem.engine.batcher import Batcher
from tandem.engine.generators import drafts_for, is_head, plain_generator
from tandem.engine.load_models import Loaded, load, load_adapters, load_draft, named_head
from tandem.engine.model_config import ModelConfig
from tandem.engine.model_drafter import ModelDrafter
from tandem.engine.sequences import TargetSequence
from tandem.host.device_times import DeviceTimes, StepTime, StepTimes, text_of
from tandem.speculation.drafters import NgramDrafter
from tandem.speculation.estimate import Estimate
from tandem.speculation.lookup_policy import PolicedLookup
from tandem.speculation.types import Chunk, Draft, GenerationRequest, Request, SamplingParams
from tandem_train.replay import Agreement, Continuation, PairCosts, RoundFigures, drafts_of, measure_costs

Show = Callable[[str], None]
ALL = "all"


@dataclass(frozen=True, slots=True)
class AcceptConfig:
    """`longest`: speculation length. `adapter`: of the target, and the draft's of that name; empty: none."""

    models: ModelConfig
    prompts: tuple[Prompt, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_new_tokens: int = 64
    longest: int = 8
    repeats: int = 15
    adapter: str = ""

    def __post_init__(self) -> None:
        if self.max_new_tokens < 2:
            raise ValueError(f"max_new_tokens: {self.max_new_tokens} is below 2")
        if self.longest < 1:
            raise ValueError(f"speculation_length: {self.longest} is below 1")
        if not self.prompts:
            raise ValueError("prompt_text: no prompt to measure on")


@dataclass(frozen=True, slots=True)
class DrafterFigures:
    """Agreement by kind of prompt, rounds by speculation length."""

    name: str
    agreement: dict[str, Agreement] = field(default_factory=dict)
    rounds: dict[int, RoundFigures] = field(default_factory=dict)

    def best(self, costs: PairCosts) -> tuple[int, float]:
        """The best speculation length and its predicted speedup; length 0 if drafting does not pay."""
        k, speedup = max(((k, made.speedup(costs, k)) for k, made in self.rounds.items()), key=lambda each: each[1])
        return (k, speedup) if speedup > 1 else (0, 1.0)


@dataclass(frozen=True, slots=True)
class PairMeasurement:
    """All results, with models, settings and device."""

    target: str
    draft: str | None
    dtype: str
    device: str
    sampling: SamplingParams
    prompts: Mapping[str, int]
    tokens: int
    max_new_tokens: int
    costs: PairCosts
    drafters: tuple[DrafterFigures, ...]
    context: int = 0

    @property
    def step_times(self) -> DeviceTimes | None:
        """Step times for rehearsals elsewhere (docs/comparison.md); None if the clock saw none."""
        propose, length = self.costs.propose, self.context
        step = propose[max(propose)] / max(propose) if propose else None
        verify = tuple(
            StepTime(1000 * seconds, 1 + k, 1, length) for k, seconds in self.costs.verify.items() if seconds > 0
        )
        if not verify:
            return None
        draft = step and step > 0 and StepTimes((StepTime(1000 * step, 1, 1, length),), self.draft or "")
        return DeviceTimes(
            name="measured",
            device=f"{self.device} with {self.target}",
            source=f"tandem accept, medians of steps at {length} tokens",
            target=StepTimes(verify, self.target),
            draft=draft or None,
        )

    def as_json(self) -> str:
        found: dict[str, Any] = asdict(self)
        found["costs"]["ratio"] = self.costs.ratio
        for drafter, figures in zip(found["drafters"], self.drafters, strict=True):
            drafter["best_speculation_length"], drafter["predicted_speedup"] = figures.best(self.costs)
        return json.dumps(found, indent=2)


async def run_accept(config: AcceptConfig, file: Path | None) -> None:
    """Measures and prints; writes JSON to `file` and the step times beside it."""
    screen, progress = Console(), Console(stderr=True)
    with progress.status("loading the pair") as status:
        found = await measure(config, status.update)
    print_measured(found, screen)
    if file:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(found.as_json() + "\n", encoding="utf-8")
        screen.print(f"wrote {file}", highlight=False)
        if found.step_times:
            times = file.with_suffix(".step_times.json")
            times.write_text(text_of(found.step_times), encoding="utf-8")
            screen.print(f"wrote {times}", highlight=False)


async def measure(config: AcceptConfig, show: Show) -> PairMeasurement:
    """Raises ValueError, one line."""
    async with _pair(config) as (batcher, target, draft):
        continuations = await _continuations(config, target, show)
        show(f"timing steps, {config.repeats} of each")
        context = min(128, config.models.shape.max_length // 2)
        models = (target.runner, draft.runner if draft else None)
        of_draft = draft.engine.adapters.take_own(config.adapter) if draft else 0
        adapters = (target.engine.adapters.take(config.adapter), of_draft)
        costs = await batcher.on_device(
            measure_costs, models, adapters, Request(config.sampling), config.longest, context, config.repeats
        )
        drafters = await _replayed(config, continuations, target, draft, show)
    identity = target.runner.identity
    kinds = [prompt.kind for prompt in config.prompts]
    return PairMeasurement(
        target=identity.model_name,
        draft=draft.runner.identity.model_name if draft else None,
        dtype=identity.dtype,
        device=identity.device,
        sampling=config.sampling,
        prompts={kind: kinds.count(kind) for kind in dict.fromkeys(kinds)},
        tokens=sum(len(one.answer) for one in continuations),
        max_new_tokens=config.max_new_tokens,
        costs=costs,
        drafters=drafters,
        context=context,
    )


@asynccontextmanager
async def _pair(config: AcceptConfig) -> AsyncIterator[tuple[Batcher, Loaded, Loaded | None]]:
    batcher = Batcher("accept")
    try:
        target = await load(config.models, batcher, head=await named_head(config.models))
        draft = await load_draft(config.models, batcher, target=target)
        await load_adapters(config.models, target, draft)
        target.engine.adapters.check(config.adapter)
        draft = drafts_for(Request(adapter=config.adapter), draft)
        if draft:
            same_tokens(draft.tokenizer, target.tokenizer.sha256)
        yield batcher, target, draft
    finally:
        await batcher.close()


async def _continuations(config: AcceptConfig, target: Loaded, show: Show) -> list[Continuation]:
    generator = plain_generator(target)
    continuations: list[Continuation] = []
    for number, prompt in enumerate(config.prompts, 1):
        show(f"the target continues {prompt.name} ({number} of {len(config.prompts)})")
        request = GenerationRequest(
            text=prompt.text,
            chat=bool(prompt.chat),
            sampling=config.sampling,
            max_new_tokens=config.max_new_tokens,
            adapter=config.adapter,
        )
        answer: list[int] = []
        async for part in generator.generate(request):
            answer += part.token_ids if isinstance(part, Chunk) else ()
        tokens = await generator.prompt_tokens(request)
        continuations.append(Continuation(prompt.kind, tuple(tokens), tuple(answer)))
    return continuations


async def _replayed(
    config: AcceptConfig, continuations: Sequence[Continuation], target: Loaded, draft: Loaded | None, show: Show
) -> tuple[DrafterFigures, ...]:
    found: dict[str, DrafterFigures] = {}
    for number, one in enumerate(continuations, 1):
        show(f"replaying the drafters ({number} of {len(continuations)})")
        drafted = {"ngram": await drafts_of(NgramDrafter(), one, config.longest)}
        if draft:
            drafted |= await _of_model(config, one, target, draft)
        for name, drafts in drafted.items():
            figures = found.setdefault(name, DrafterFigures(name))
            for kind in (one.kind, ALL):
                figures.agreement.setdefault(kind, Agreement()).add(one.answer, drafts)
            for k in range(1, config.longest + 1):
                figures.rounds.setdefault(k, RoundFigures()).add(one.answer, drafts, k)
    return tuple(found.values())


async def _of_model(config: AcceptConfig, one: Continuation, target: Loaded, draft: Loaded) -> dict[str, list[Draft]]:
    request = Request(config.sampling, adapter=config.adapter)
    read = None
    if is_head(draft):  # the head finds the features in the target's slot of its number
        read = await TargetSequence.admitted(target.engine, request, len(one.prompt))
        await read.fill((*one.prompt, *one.answer))
    try:
        drafter = ModelDrafter(draft.engine, request, target.runner.limits.vocab_size)
        model = await drafts_of(drafter, one, config.longest)
    finally:
        if read:
            read.close()
    lookup = PolicedLookup(Estimate())
    copies = [lookup.copy(text, config.longest) for text in one.texts()]
    hybrid = [copied if copied.token_ids else own for copied, own in zip(copies, model, strict=True)]
    return {"model": model, "hybrid": hybrid}


def print_measured(found: PairMeasurement, console: Console) -> None:
    sampling = found.sampling
    how = "greedy" if sampling.greedy else f"temperature {sampling.temperature:g}, seed {sampling.seed}"
    for make in (_agreement, _rounds, _lengths):
        console.print(make(found))
    console.print(
        f"target {found.target}, draft {found.draft or 'none'}; {found.dtype} on {found.device}; {how};"
        f" {sum(found.prompts.values())} prompts, {found.tokens} tokens",
        style="dim",
        highlight=False,
    )
    costs = found.costs
    longest = max(costs.verify)
    line = f"A target step takes {1000 * costs.verify[0]:.1f} ms, {1000 * costs.verify[longest]:.1f} ms with {longest}"
    console.print(f"{line} draft tokens.", highlight=False)
    if costs.draft_step is not None and costs.ratio is not None:
        line = f"A draft step takes {1000 * costs.draft_step:.2f} ms: cost ratio {costs.ratio:.3f}."
        console.print(line, highlight=False)
    for drafter in found.drafters:
        console.print(_verdict(found, drafter), highlight=False)


def _table(title: str, columns: Sequence[object], rows: Sequence[Sequence[str]]) -> Group:
    made = Table()
    for number, column in enumerate(columns):
        made.add_column(str(column), justify="right" if number else "left")
    for row in rows:
        made.add_row(*row)
    return Group(title, made)


def _agreement(found: PairMeasurement) -> Group:
    rows = [
        [kind, *(f"{d.agreement[kind].agreed / max(1, d.agreement[kind].tokens):.3f}" for d in found.drafters)]
        for kind in (*found.prompts, ALL)
    ]
    columns = ["workload", *(drafter.name for drafter in found.drafters)]
    return _table("Agreement: share of next tokens that are the target's", columns, rows)


def _rounds(found: PairMeasurement) -> Group:
    """Rounds that reach each position, at the longest speculation length."""
    longest = max(found.drafters[0].rounds)
    rows = []
    for drafter in found.drafters:
        made = drafter.rounds[longest]
        rows.append([drafter.name, *(f"{count / max(1, made.rounds):.2f}" for count in made.by_position)])
    title = f"Rounds of {longest}: share of rounds in which draft token i was accepted"
    return _table(title, ["drafter", *range(1, longest + 1)], rows)


def _lengths(found: PairMeasurement) -> Group:
    """Tokens per round and predicted speedup by speculation length, with step costs."""
    lengths, costs = sorted(found.drafters[0].rounds), found.costs
    rows = [["verify, ms", *(f"{1000 * costs.verify[k]:.1f}" for k in lengths)]]
    if costs.propose:
        rows.append(["draft, ms", *(f"{1000 * costs.propose[k]:.1f}" for k in lengths)])
    for drafter in found.drafters:
        rows.append([drafter.name, *(f"{drafter.rounds[k].tokens_per_round:.2f}" for k in lengths)])
        rows.append(["", *(f"{drafter.rounds[k].speedup(costs, k):.2f}x" for k in lengths)])
    return _table("By speculation length: tokens per round, predicted speedup", ["", *lengths], rows)


def _verdict(found: PairMeasurement, drafter: DrafterFigures) -> str:
    k, speedup = drafter.best(found.costs)
    if not k:
        return f"{drafter.name}: does not pay at any speculation length; plain decoding is as fast."
    return f"{drafter.name}: best speculation length {k}, predicted {speedup:.2f}x over plain decoding."
