"""Measures a pair: generates with the target once, replays every drafter against its output, and times steps."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from tandem.checkpoints.tokenizers import same_tokens
from tandem.comparison.analysis.bootstrap import Interval, paired_interval
from tandem.comparison.analysis.doubt import EARLY_TOKENS, MORE_PROMPTS, MORE_RUNS, Doubt, doubt
from tandem.comparison.analysis.evidence import beside_loads
from tandem.comparison.analysis.metrics import ratio, sum_counts, sum_positions
from tandem.comparison.measuring.json_form import encoded
from tandem.comparison.measuring.machine_load import LoadWatch, MachineLoad
from tandem.comparison.measuring.workloads import Prompt
from tandem.engine.batcher import Batcher
from tandem.engine.generators import drafts_for, is_head, plain_generator
from tandem.engine.loading import Loaded, load, load_adapters, load_draft, load_draft_adapters, named_head
from tandem.engine.model_config import ModelConfig
from tandem.engine.model_drafter import ModelDrafter
from tandem.engine.sequences import TargetSequence
from tandem.host.cores import usable_cores
from tandem.host.device_times import DeviceTimes, ModelTimes, StepTime, StepTimes
from tandem.speculation.drafters import Drafter, NgramDrafter
from tandem.speculation.estimate import Estimate
from tandem.speculation.hybrid import HybridDrafter
from tandem.speculation.lookup_policy import PolicedLookup
from tandem.speculation.types import Chunk, GenerationRequest, Request, SamplingParams, SpeculationStats
from tandem.workshops.training.acceptance.costs import PairCosts, measure_costs
from tandem.workshops.training.acceptance.replay import Agreement, Continuation, MemoizedDrafter, agreement, replay

Show = Callable[[str], None]
ALL = "all"


@dataclass(frozen=True, slots=True)
class AcceptConfig:
    """What to measure: models, prompts, output length, sampling parameters, and the longest speculation length.

    `adapter`: the name of the one that all of it has, the draft's own of that name included; empty: none.
    """

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
class RoundFigures:
    """A drafter's rounds at one speculation length over some prompts. asked: the rounds in which the model drafted.

    by_prompt: the tokens and the rounds of each prompt.
    """

    rounds: int
    tokens: int
    drafted: int
    accepted: int
    by_position: tuple[float, ...]
    drafted_by: Mapping[str, int]
    accepted_by: Mapping[str, int]
    asked: int
    by_prompt: tuple[tuple[int, int], ...] = ()

    @property
    def tokens_per_round(self) -> float:
        """Mean tokens per round, the target's own included; 0 if there was no round."""
        return ratio(self.tokens, self.rounds) or 0.0

    def speedup(self, costs: PairCosts, k: int) -> float:
        """Returns the speedup over plain decoding predicted from step costs, without request handling and network.

        It is 1 if the steps took no time.
        """
        drafting = costs.propose[k] * self.asked / self.rounds if self.asked else 0.0
        found = ratio(self.tokens_per_round * costs.verify[0], costs.verify[k] + drafting)
        return 1.0 if found is None else found

    def interval(self, speedup: float) -> Interval | None:
        """Returns the 95 % interval of a predicted speedup, over prompts: that of the tokens per round."""
        spread = paired_interval(*zip(*self.by_prompt, strict=True)) if self.by_prompt else None
        each = ratio(speedup, self.tokens_per_round)
        return None if spread is None or each is None else (each * spread[0], each * spread[1])


@dataclass(frozen=True, slots=True)
class DrafterFigures:
    """Results of one drafter. agreement: by workload and overall. rounds: by speculation length, then by workload."""

    name: str
    agreement: Mapping[str, Agreement]
    rounds: Mapping[int, Mapping[str, RoundFigures]]

    def best(self, costs: PairCosts, kind: str = ALL) -> tuple[int, float]:
        """Returns the best speculation length and its predicted speedup; length 0 if drafting does not pay."""
        speedups = {k: by_kind[kind].speedup(costs, k) for k, by_kind in self.rounds.items()}
        k = max(speedups, key=speedups.__getitem__)
        return (k, speedups[k]) if speedups[k] > 1 else (0, 1.0)

    def interval(self, costs: PairCosts) -> Interval | None:
        """Returns the 95 % interval of the highest predicted speedup, whether or not drafting pays."""
        speedups = {k: by_kind[ALL].speedup(costs, k) for k, by_kind in self.rounds.items()}
        k = max(speedups, key=speedups.__getitem__)
        return self.rounds[k][ALL].interval(speedups[k])


@dataclass(frozen=True, slots=True)
class PairMeasurement:
    """All results, with the models, settings and machine that they were measured on."""

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
    answers: tuple[int, ...] = ()
    machine_load: MachineLoad = field(default_factory=MachineLoad)
    context: int = 0

    def doubt_of(self, drafter: DrafterFigures) -> Doubt:
        """Says how sure a drafter's predicted speedup is, by the rule of the comparison."""
        evidence = replace(
            beside_loads([self.machine_load], usable_cores()),
            prompts=len(self.answers),
            answers=len(self.answers),
            timed_tokens=self.tokens,
            early=ratio(sum(tokens < EARLY_TOKENS for tokens in self.answers), len(self.answers)),
            interval=drafter.interval(self.costs),
            steps_vary=self.costs.vary,
            predicted=True,
        )
        found = doubt(evidence)
        ways = (MORE_PROMPTS if way == MORE_RUNS else way for way in found.surer)  # a pair is replayed once
        return replace(found, surer=tuple(dict.fromkeys(ways)))

    @property
    def step_times(self) -> DeviceTimes | None:
        """The step times, for rehearsals elsewhere (docs/rehearsal.md); None if steps took no time, to the clock."""
        propose, length = self.costs.propose, self.context
        step = propose[max(propose)] / max(propose) if propose else None
        verify = tuple(
            StepTime(1000 * seconds, 1 + k, 1, length) for k, seconds in self.costs.verify.items() if seconds > 0
        )
        if not verify:
            return None
        draft = step and step > 0 and ModelTimes(self.draft or "", StepTimes((StepTime(1000 * step, 1, 1, length),)))
        return DeviceTimes(
            name="measured",
            device=f"{self.device} with {self.target}",
            source=f"tandem accept, medians of steps at {length} tokens",
            target=ModelTimes(self.target, StepTimes(verify)),
            draft=draft or None,
        )

    def as_json(self) -> str:
        found: dict[str, Any] = asdict(self)
        found["costs"]["ratio"] = self.costs.ratio
        for drafter, figures in zip(found["drafters"], self.drafters, strict=True):
            drafter["best_speculation_length"], drafter["predicted_speedup"] = figures.best(self.costs)
            drafter |= encoded(self.doubt_of(figures))
        return json.dumps(found, indent=2)


async def measure(config: AcceptConfig, show: Show) -> PairMeasurement:
    """Loads the pair and measures it. Raises ValueError with a one-line message."""
    async with _pair(config) as (batcher, target, draft):
        continuations = await _continuations(config, target, show)
        show(f"timing steps, {config.repeats} of each")
        context = min(128, config.models.shape.max_length // 2)
        runner = draft.runner if draft else None
        numbers = (
            target.engine.adapters.take(config.adapter),
            draft.engine.adapters.take_own(config.adapter) if draft else 0,
        )
        watch = await LoadWatch.started()
        costs = await measure_costs(
            target.runner, runner, batcher, config.sampling, config.longest, context, config.repeats, numbers
        )
        machine_load = watch.ended()
        figures = await _replay_all(config, continuations, target, draft, show)
    identity = target.runner.identity
    return PairMeasurement(
        target=identity.model_name,
        draft=draft.runner.identity.model_name if draft else None,
        dtype=identity.dtype,
        device=identity.device,
        sampling=config.sampling,
        prompts={
            kind: sum(p.kind == kind for p in config.prompts) for kind in dict.fromkeys(p.kind for p in config.prompts)
        },
        tokens=sum(len(one.answer) for one in continuations),
        max_new_tokens=config.max_new_tokens,
        costs=costs,
        drafters=figures,
        answers=tuple(len(one.answer) for one in continuations),
        machine_load=machine_load,
        context=context,
    )


@asynccontextmanager
async def _pair(config: AcceptConfig) -> AsyncIterator[tuple[Batcher, Loaded, Loaded | None]]:
    batcher = Batcher("accept")
    try:
        target = await load(config.models, batcher, head=await named_head(config.models))
        draft = await load_draft(config.models, batcher, target=target)
        await load_adapters(config.models, target)
        target.engine.adapters.check(config.adapter)
        await load_draft_adapters(config.models, draft, target)
        draft = drafts_for(Request(adapter=config.adapter), draft)
        if draft:
            same_tokens(draft.tokenizer, target.tokenizer.sha256)
        yield batcher, target, draft
    finally:
        await batcher.close()


async def _continuations(config: AcceptConfig, target: Loaded, show: Show) -> list[Continuation]:
    """Generates the target's continuations by plain decoding."""
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
        continuations.append(Continuation(prompt.kind, tuple(tokens), tuple(answer), config.sampling))
    return continuations


@dataclass(frozen=True, slots=True)
class _Replayed:
    """One continuation replayed with one drafter."""

    continuation: Continuation
    agreement: Agreement
    rounds: Mapping[int, tuple[SpeculationStats, int]]


def _drafters(model: MemoizedDrafter | None) -> dict[str, Callable[[], Drafter]]:
    """Returns a maker of each kind of drafter for this pair."""
    if model is None:
        return {"ngram": NgramDrafter}
    return {
        "ngram": NgramDrafter,
        "model": lambda: model,
        "hybrid": lambda: HybridDrafter(PolicedLookup(Estimate()), model),
    }


async def _replay_all(
    config: AcceptConfig, continuations: Sequence[Continuation], target: Loaded, draft: Loaded | None, show: Show
) -> tuple[DrafterFigures, ...]:
    longest = config.longest
    replayed: dict[str, list[_Replayed]] = {}
    for number, one in enumerate(continuations, 1):
        show(f"replaying the drafters ({number} of {len(continuations)})")
        request = Request(one.sampling, adapter=config.adapter)
        inner = ModelDrafter(draft.engine, request, target.runner.limits.vocab_size) if draft else None
        model = MemoizedDrafter(inner, one, longest) if inner else None
        read = await _features(target, one, request) if draft and is_head(draft) else None
        try:
            for name, drafter in _drafters(model).items():
                lengths = [drafter() for _ in range(longest + 1)]
                replayed.setdefault(name, []).append(await _replay(lengths, model, one))
        finally:
            if inner:
                await inner.close()
            if read:
                read.close()
    return tuple(_figures(name, parts, longest) for name, parts in replayed.items())


async def _features(target: Loaded, one: Continuation, request: Request) -> TargetSequence:
    """Has the target process a continuation, in the slot of the number that the head gets, for its features."""
    sequence = await TargetSequence.admitted(target.engine, request, len(one.prompt))
    await sequence.fill((*one.prompt, *one.answer))
    return sequence


async def _replay(lengths: Sequence[Drafter], model: MemoizedDrafter | None, continuation: Continuation) -> _Replayed:
    """Replays a continuation. `lengths`: the drafter for each speculation length; that of 0 drafts every token."""
    agreed = await agreement(lengths[0], continuation)
    rounds: dict[int, tuple[SpeculationStats, int]] = {}
    for k, drafter in enumerate(lengths[1:], 1):
        before = model.asked if model else 0
        stats = await replay(drafter, continuation, k)
        rounds[k] = (stats, (model.asked if model else 0) - before)
    return _Replayed(continuation, agreed, rounds)


def _figures(name: str, parts: Sequence[_Replayed], longest: int) -> DrafterFigures:
    groups = _by_kind([(part.continuation.kind, part) for part in parts])
    return DrafterFigures(
        name,
        {kind: _sum([part.agreement for part in group]) for kind, group in groups.items()},
        {
            k: {
                kind: _rounds([(part.continuation, *part.rounds[k]) for part in group])
                for kind, group in groups.items()
            }
            for k in range(1, longest + 1)
        },
    )


def _by_kind(items: Sequence[tuple[str, Any]]) -> dict[str, list[Any]]:
    groups: dict[str, list[Any]] = {}
    for kind, item in items:
        groups.setdefault(kind, []).append(item)
    return groups | {ALL: [item for _, item in items]}


def _sum(parts: Sequence[Agreement]) -> Agreement:
    return Agreement(sum(p.agreed for p in parts), sum(p.proposed for p in parts), sum(p.tokens for p in parts))


def _rounds(parts: Sequence[tuple[Continuation, SpeculationStats, int]]) -> RoundFigures:
    stats = [s for _, s, _ in parts]
    count = sum(s.rounds for s in stats)
    return RoundFigures(
        rounds=count,
        tokens=sum(len(one.answer) for one, _, _ in parts),
        drafted=sum(s.drafted for s in stats),
        accepted=sum(s.accepted for s in stats),
        by_position=tuple(ratio(a, count) or 0.0 for a in sum_positions(s.accepted_per_position for s in stats)),
        drafted_by=sum_counts(s.drafted_by for s in stats),
        accepted_by=sum_counts(s.accepted_by for s in stats),
        asked=sum(asked for _, _, asked in parts),
        by_prompt=tuple((len(one.answer), s.rounds) for one, s, _ in parts),
    )
