"""Writes the model card of an EAGLE-1 head."""

from __future__ import annotations

from typing import Any


def eagle1_card(found: dict[str, Any], training: dict[str, Any]) -> str:
    """Returns Markdown for Hugging Face. found: acceptance.json. training: content of training.json."""
    config, kept = training["config"], ", ".join(training["held_out_kinds"]) or "none"
    return f"""---
base_model: {found["target"]}
tags: [speculative-decoding, eagle]
---

# An EAGLE-1 head for {found["target"]}

One decoder layer that predicts the next hidden state of {found["target"]}. It works with this target alone. It is laid
out as published heads are, without an output matrix. NxD Inference wants the target's in it; Tandem then serves the
result with that backend and `--eagle`:

    python main.py --role convert --convert eagle --draft_model FOLDER --target_model TARGET --output DRAFT

The licence is that of the target and of the data that it generated.

## Made from

* Data: {training["train_tokens"]:,} tokens in {training["train_sequences"]:,} continuations that the target generated,
  with its hidden states. Kinds kept out of training: {kept}.
* Training: {training["steps"]:,} steps of about {config["batch"]:,} tokens, {training["seconds"] / 60:.0f} minutes;
  regression {config["regression"]:g}, classification {config["classification"]:g}, noise {config["noise"]:g}; seed
  {config["seed"]}.
* Target weights: `{training["target"]}`.

## Rounds of {found["k"]}, greedy

Simulated by module code in {found["dtype"]} on {found["device"]}, along what the target says greedily on the built-in
prompts, none used in training. Draft token i accepted, of the rounds that had one, and tokens per round (the target's
own included):

{_table(found)}
## Limits

The results hold for this target only. It was not run on Trainium, and nothing is said about speed. NxD Inference
computes in another number format, which may change a guess at a tie. The training prompts are of few kinds, so
acceptance is lower on text unlike them. This head saw {training["train_tokens"]:,} tokens; a good one needs 700,000 and
more.
"""


def _table(found: dict[str, Any]) -> str:
    positions = range(1, found["k"] + 1)
    lines = [["kind", "tokens", *map(str, positions), "tokens per round"], ["---", *["---:"] * (found["k"] + 2)]]
    for name, one in found["kinds"].items():
        shares = [f"{share:.2f}" for share in one["by_position"]]
        lines.append([name, str(one["tokens"]), *shares, f"{one['tokens_per_round']:.2f}"])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
