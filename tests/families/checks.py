"""Runs a model through the product's own loaders in every company, and compares its tokens with the reference."""

from __future__ import annotations

import random
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tandem.checkpoints.locate import find
from tandem.runners.load_runner import Execution, Shape, load_runner
from tandem.runners.protocol import PrefillRow, Verdict
from tandem.speculation.types import SamplingParams
from tests.rows import verify_row

PROMPTS, COUNT, CHUNK, DRAFT = (5, 40, 150), 24, 64, 3
GREEDY = SamplingParams()


@dataclass(frozen=True)
class Result:
    """A row of the matrix. `verdict`: equal, near (of quantised weights), refused, wrong or traceback.

    `said`: the refusal, or what is wrong. `far`: how far the worst token is from the best, in deviations of logits.
    """

    family: str
    variant: str
    file: str
    formats: str
    runs: str
    exact: bool
    verdict: str
    said: str = ""
    far: float = 0.0

    @property
    def failed(self) -> bool:
        return self.verdict in ("wrong", "traceback")


def prompt(count: int, vocab: int = 300) -> list[int]:
    chance = random.Random(count)
    return [chance.randrange(3, vocab) for _ in range(count)]


Decoded = tuple[list[int], list[float]]


def decoded(
    runner: Any, prompts: Sequence[list[int]], counts: Sequence[int], drafts: bool, chunk: int
) -> list[Decoded]:
    """Greedy tokens and their margins after prompts that share every step; `drafts`: with wrong ones of any length."""
    chance = random.Random(len(prompts))
    texts, margins = [list(each) for each in prompts], [list[float]() for _ in prompts]
    for slot, text in enumerate(texts):
        for at in range(0, len(text) - 1, chunk):
            (failed,) = runner.prefill([PrefillRow(slot, at, tuple(text[at : min(at + chunk, len(text) - 1)]))])
            assert failed is None, failed
    while short := [slot for slot, text in enumerate(texts) if len(text) < len(prompts[slot]) + counts[slot]]:
        rows = []
        for slot in short:
            left = len(prompts[slot]) + counts[slot] - len(texts[slot]) - 1
            width = min(left, chance.randrange(DRAFT + 1)) if drafts else 0
            draft = [chance.randrange(3, 300) for _ in range(width)]
            rows.append(verify_row(slot, len(texts[slot]) - 1, texts[slot][-1], draft, GREEDY, margins=True))
        for slot, verdict in zip(short, runner.verify(rows), strict=True):
            assert isinstance(verdict, Verdict), verdict
            texts[slot] += verdict.token_ids
            margins[slot] += verdict.margins
    cut = [len(each) + count for each, count in zip(prompts, counts, strict=True)]
    return [(text[:end], more[:count]) for text, more, end, count in zip(texts, margins, cut, counts, strict=True)]


def gap(module: Any, texts: Sequence[list[int]], prompts: Sequence[list[int]], length: int) -> tuple[int, float]:
    """Tokens that the reference would not choose after what is before them, and how far it is from choosing the worst.

    The distance is in standard deviations of its logits. What follows a text only gives it the configured length, which
    scaling by length reads.
    """
    import torch

    whole = torch.tensor([[*text, *[3] * (length - len(text))] for text in texts])
    with torch.inference_mode():
        logits = module(input_ids=whole, attention_mask=torch.ones_like(whole), use_cache=False).logits.float()
    wrong, worst = 0, 0.0
    for text, before, row in zip(texts, prompts, logits, strict=True):
        for place in range(len(before), len(text)):
            after = row[place - 1]
            lost = float((after.max() - after[text[place]]) / after.std())
            wrong, worst = wrong + (lost > 1e-4), max(worst, lost)
    return wrong, worst


def load(path: Path, length: int, **execution: Any) -> Any:
    """The runner of a file or folder, warmed up."""
    shape = Shape(slots=3, max_length=length, max_draft=DRAFT, chunk=CHUNK)
    runner = load_runner(find(str(path)), Execution("cpu", **{"dtype": "float32", "threads": 1, **execution}), shape)
    runner.warm_up()
    return runner


def checked(
    row: Any, path: Path, file: str, formats: str, module: Callable[[], Any], near: float = 0.0, **execution: Any
) -> Result:
    """The row's result for a file. `near`: how far a token of quantised weights may be from the best, else 0."""
    blank = Result(row.family, row.variant, file, formats, "refused", False, "refused")
    try:
        runner = load(path, row.within, **execution)
    except (ValueError, ModuleNotFoundError) as error:  # what the command line ends with in one line and code 2
        return replace(blank, said=str(error), verdict="traceback" if "\n" in str(error) else "refused")
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        said = f"{type(error).__name__}: {error!s:.150} ({Path(where.filename).name}:{where.lineno})"
        return replace(blank, verdict="traceback", said=said)
    native = "native" if runner.identity.backend == "native" else "module code"
    done = replace(blank, runs=native, exact=runner.shapes.bit_exact)
    try:
        return _compared(row, runner, module, near, done)
    except Exception as error:
        return replace(done, verdict="traceback", said=f"{type(error).__name__}: {error!s:.150}")


def _compared(row: Any, runner: Any, module: Callable[[], Any], near: float, done: Result) -> Result:
    prompts = [prompt(min(count, row.within - COUNT)) for count in PROMPTS]
    counts = [min(COUNT, row.within - len(each)) for each in prompts]
    alone = [
        decoded(runner, [text], [count], False, chunk)[0]
        for text, count, chunk in zip(prompts, counts, (CHUNK, 7, CHUNK), strict=True)
    ]
    company = decoded(runner, prompts, counts, True, 29)
    runner_says = [
        said
        for said, differs in (
            ("tokens differ in company", [each[0] for each in alone] != [each[0] for each in company]),
            ("bits differ in company, though bit_exact", done.exact and alone != company),
        )
        if differs
    ]
    wrong, worst = gap(module(), [each[0] for each in alone], prompts, row.within)
    if len({token for text, before in zip(alone, prompts, strict=True) for token in text[0][len(before) :]}) < 4:
        runner_says.append("the model repeats itself, and shows nothing")
    if wrong and worst > near:
        runner_says.insert(0, f"{wrong} of {sum(counts)} tokens wrong, the worst by {worst:.2g} deviations")
    verdict = "wrong" if runner_says else "near" if wrong else "equal"
    return replace(done, verdict=verdict, said="; ".join(runner_says), far=round(worst, 4))
