"""Writes the model card of a head: its data, configuration and measured acceptance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tandem.workshops.training.card import markdown_table


def head_card(found: Sequence[dict[str, Any]], training: dict[str, Any]) -> str:
    """Returns Markdown for Hugging Face. found: figures at several temperatures. training: content of training.json."""
    return "\n".join(
        (_front(found[0]), _made_from(training), _held_out(training), *map(_rounds, found), _limits(training))
    )


_LICENCES = {"SmolLM2-135M-Instruct": "license: apache-2.0\n"}


def _front(found: dict[str, Any]) -> str:
    target = found["target"]
    return f"""---
{_LICENCES.get(target, "")}base_model: {target}
tags: [speculative-decoding, eagle3]
---

# An EAGLE-3 head for {target}

One decoder layer that reads hidden states of its target and drafts the next tokens. It works with this target alone,
and the output stays the target's own. With Tandem:

    python main.py --role fused_target --model TARGET --draft eagle --draft_model FOLDER

The licence is that of the target and of the data that it generated.
"""


def _made_from(training: dict[str, Any]) -> str:
    config = training["config"]
    kinds = ", ".join(training["held_out_kinds"]) or "none"
    return f"""## Made from

* Data: {training["train_tokens"]:,} tokens in {training["train_sequences"]:,} continuations that the target generated,
  with its hidden states after {", ".join(map(str, training["layers"]))} layers. Kinds kept out of training: {kinds}.
* Training: {training["steps"]:,} steps of about {config["batch"]:,} tokens, {training["seconds"] / 60:.0f} minutes on
  {training["device"]}, with {config["steps"]} steps of training-time test; seed {config["seed"]}.
* Head: {training["columns"]:,} columns of the vocabulary.
* Target weights: `{training["target"]}`.
"""


def _held_out(training: dict[str, Any]) -> str:
    kept = training["held_out_kinds"]
    rows = [
        [f"{name} (not trained on)" if name in kept else name, *(f"{share:.3f}" for share in shares)]
        for name, shares in training["held_out_acceptance"].items()
    ]
    longest = max((len(row) - 1 for row in rows), default=0)
    return f"""## Held-out continuations

Share of drafts whose first 1, 2, ... tokens are all what the target says, on continuations of prompts that were held
out, without rounds:

{markdown_table(["kind", *(str(i + 1) for i in range(longest))], rows)}"""


def _rounds(found: dict[str, Any]) -> str:
    rows = [
        [name, kind["tokens"], *(f"{share:.2f}" for share in kind["by_position"]), f"{kind['tokens_per_round']:.2f}"]
        for name, kind in found["kinds"].items()
    ]
    how = "greedy" if not found["temperature"] else f"temperature {found['temperature']:g}"
    return f"""## Rounds of {found["k"]}, {how}

Built-in prompts, none used in training; {found["dtype"]} on {found["device"]}. Draft token i accepted, of the rounds
that had one, and tokens per round (the target's own included):

{markdown_table(["kind", "tokens", *(str(i + 1) for i in range(found["k"])), "tokens per round"], rows)}"""


def _limits(training: dict[str, Any]) -> str:
    return f"""## Limits

The results hold for this target only. Acceptance is lower on text unlike the training prompts; what a kind costs that
is kept out of training, `--held-out-kinds` tells. This head saw {training["train_tokens"]:,} tokens.
"""
