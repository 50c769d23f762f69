"""Measures what the simulation of a target that never waits is given: which drafts are right, and how long steps take.

Ranks: before each token of an output that plain decoding gave, the drafter is asked for its choice; rank 0 stands for
the token itself, rank 1 for any other. Step times: rounds of the worker that waits, at fixed lengths.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np

from benchmarks.run_simulation import simulate_never_waiting
from tandem.cli.main import parser
from tandem.cli.models import model_config
from tandem.comparison.measuring.records import Measurement
from tandem.comparison.measuring.run import Contender, measure
from tandem.comparison.measuring.workloads import Prompt
from tandem.engine.batcher import Batcher
from tandem.engine.drafting import Drafting, load_drafting
from tandem.speculation.never_waiting_theory import RunCosts
from tandem.speculation.types import GenerationRequest, Request, SamplingParams

CALIBRATED = (1, 3, 5)
"""Draft tokens of the rounds that are timed, beside plain steps."""
DEPTHS, WIDTHS = (4, 8, 16, 32), (1, 2, 3, 5)
"""What the simulated client may draft from each arrival, and the simulated steps verify; the best of them counts."""


@asynccontextmanager
async def drafter_of(worker: Sequence[str]) -> AsyncIterator[Drafting]:
    """Loads the drafter of a draft worker with these arguments."""
    arguments = parser().parse_args(["--role", "draft_worker", *worker])
    batcher = Batcher("ranks")
    try:
        yield await load_drafting(model_config(arguments, None), batcher)
    finally:
        await batcher.close()


async def ranks(
    drafting: Drafting, prompt: Prompt, output: Sequence[int], sampling: SamplingParams, vocab_size: int
) -> list[int]:
    """Returns 0 for each token of `output` that the drafter would have chosen, and 1 for each other."""
    tokens = drafting.tokenizer.encode(prompt.text, bool(prompt.chat))
    drafter = drafting.drafter(Request(sampling), vocab_size)
    found = []
    await drafter.open(tokens)
    try:
        for token in output:
            draft = await drafter.propose(tokens, 1)
            found.append(0 if draft.token_ids[:1] == (token,) else 1)
            tokens.append(token)
    finally:
        await drafter.close()
    return found


async def step_seconds(
    contender: Contender, request: GenerationRequest, prompts: Sequence[Prompt], plain: float
) -> Callable[[int], float]:
    """Returns the seconds of a step by its tokens, as `contender` measured it; `plain`: of one without a draft."""
    sizes, seconds = [1.0], [plain]
    for length in CALIBRATED:
        found = [await measure(contender, p.into(replace(request, speculation_length=length))) for p in prompts]
        rounds = sum(m.rounds for m in found)
        sizes.append(1 + sum(m.drafted for m in found) / rounds)
        seconds.append(max(plain, sum(m.seconds_by_cause.verify for m in found) / rounds))
    return lambda tokens: float(np.interp(tokens, sizes, seconds))


async def round_trip_seconds(contender: Contender, request: GenerationRequest, prompts: Sequence[Prompt]) -> float:
    """Returns the seconds of a round of `contender` that are spent neither drafting nor at the target."""
    found = [await measure(contender, prompt.into(request)) for prompt in prompts]
    return sum(m.seconds_by_cause.network for m in found) / sum(m.rounds for m in found)


def simulated(sequences: Sequence[Sequence[int]], costs: RunCosts) -> float:
    """Returns the seconds per token of the best simulated client that extends its drafts."""
    tpots = (
        simulate_never_waiting(sequences, costs, depth, width, extends=True, prepared=False)
        for depth in DEPTHS
        for width in WIDTHS
        if width <= depth
    )
    return min(costs.step(1), *tpots)


def draft_seconds(found: Sequence[Measurement]) -> float:
    """Returns the seconds of drafting a token, of all that were drafted, used or not."""
    drafted = sum(m.drafted + m.stale_drafts for m in found)
    return sum(m.seconds_by_cause.draft for m in found) / max(1, drafted)
