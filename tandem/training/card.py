"""The model card: what a draft was made from and what it reached, all of it measured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tandem.training.acceptance.measure import ALL, Measured


def card(found: Sequence[Measured], training: dict[str, Any], curve: Sequence[dict[str, Any]]) -> str:
    """Markdown for Hugging Face: front matter, then figures. `found` are measurements at several temperatures."""
    first = found[0]
    parts = [
        _front(first),
        _made_from(first, training),
        *(_agreement(one) for one in found),
        *(_rounds(one) for one in found),
        _costs(first),
        _curve(training, curve) if curve else "",
        _limits(),
    ]
    return "\n".join(part for part in parts if part)


def _table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    head = list(head)
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *([str(cell) for cell in row] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _front(found: Measured) -> str:
    return f"""---
license: apache-2.0
base_model: {found.target}
library_name: transformers
pipeline_tag: text-generation
tags: [speculative-decoding, draft-model, distillation]
---

# A draft for {found.target}

A small Llama that guesses what {found.target} will say next, for speculative decoding with Tandem. It shares the
target's tokenizer exactly. Alone it is of no use: its only measure is how often the target agrees.

Licence: Apache-2.0; distilled from {found.target}, which is Apache-2.0. The training data was written by that model
alone, after prompts that Tandem makes (`tandem/training/prompts.py`).
"""


def _made_from(found: Measured, training: dict[str, Any]) -> str:
    config = training["config"]
    student = config["student"]
    began = (
        f"weights that began as those of {Path(config['start']).name}"
        if config.get("start")
        else "tied embeddings that began as the target's, reduced by principal components"
    )
    return f"""## Made from

* Data: {training["train_tokens"]:,} tokens that the target said in {training["train_sequences"]:,} continuations
  (a third greedy, the rest at temperatures 0.6 and 0.9), with its 24 best tokens and their probabilities at each.
* Training: {training["steps"]:,} steps of about {config["batch"]:,} tokens, {training["seconds"] / 60:.0f} minutes;
  cross-entropy against the target's distribution and, with weight {config["hard"]}, against its first choice.
* Shape: hidden {student["hidden"]}, {student["layers"]} layers, {student["heads"]} heads, feed-forward
  {student["feed_forward"]}, {began}.
* Target weights: `{training["target"]}`.

Made again with `python -m draft_training.generate`, `... .train` and `... .evaluate`; both random seeds are fixed.
"""


def _how(found: Measured) -> str:
    return "greedy" if found.sampling.greedy else f"temperature {found.sampling.temperature:g}"


def _agreement(found: Measured) -> str:
    names = [d.name for d in found.drafters]
    rows = [
        [kind, *(f"{d.agreement[kind].agreed / d.agreement[kind].tokens:.3f}" for d in found.drafters)]
        for kind in (*found.prompts, ALL)
    ]
    return f"""## Acceptance by workload, {_how(found)}

Share of all tokens on which the drafter's next token was the target's. {sum(found.prompts.values())} prompts, none of
them trained on, {found.tokens:,} tokens; {found.dtype} on {found.device}. hybrid is what Tandem uses: n-gram lookup
where the text repeats itself, the model elsewhere.

{_table(["workload", *names], rows)}"""


def _rounds(found: Measured) -> str:
    longest = max(found.drafters[0].rounds)
    rows = [[d.name, *(f"{share:.2f}" for share in d.rounds[longest][ALL].by_position)] for d in found.drafters]
    lengths = [
        [d.name, *(f"{d.rounds[k][ALL].tokens_per_round:.2f}" for k in sorted(d.rounds))] for d in found.drafters
    ]
    numbers = [str(k) for k in range(1, longest + 1)]
    return f"""## Rounds, {_how(found)}

Share of rounds of {longest} in which draft token i was accepted:

{_table(["drafter", *numbers], rows)}
Tokens per round (the target's own included), by speculation length:

{_table(["drafter", *numbers], lengths)}"""


def _costs(found: Measured) -> str:
    costs = found.costs
    assert costs.draft_step is not None and costs.ratio is not None
    best = [(d.name, *d.best(costs)) for d in found.drafters]
    rows = [[name, k, f"{speedup:.2f}x"] for name, k, speedup in best]
    return f"""## Cost

Measured in one run ({found.dtype} on {found.device}): a draft step {1000 * costs.draft_step:.2f} ms, a target step
{1000 * costs.verify[0]:.1f} ms, ratio {costs.ratio:.3f}. From these and the rounds above:

{_table(["drafter", "best speculation length", "predicted speedup"], rows)}"""


def _curve(training: dict[str, Any], curve: Sequence[dict[str, Any]]) -> str:
    runs = sorted((*curve, training), key=lambda run: run["train_tokens"])
    kinds = [*(k for k in training["held_out_agreement"] if k != ALL), ALL]
    rows = [
        [f"{run['train_tokens']:,}", run["steps"], *(f"{run['held_out_agreement'].get(k, 0):.3f}" for k in kinds)]
        for run in runs
    ]
    return f"""## What data brings

The model alone on held-out continuations of training prompts, greedy, by tokens of the target's that it was trained on:

{_table(["tokens", "steps", *kinds], rows)}"""


def _limits() -> str:
    return """## Limits

English, Python and the like, contexts of a few hundred tokens. Figures hold for this target only. The prompts measured
on were not trained on, but training prompts are of the same kinds, and for counting and tables close to them: text
unlike any of the five kinds will be guessed less well.
"""
