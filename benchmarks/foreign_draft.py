"""Measures what a foreign vocabulary costs in acceptance: the shipped draft, and copies of it with other vocabularies.

    .venv/bin/python -m benchmarks.foreign_draft

One copy has the same tokens by other ids, which costs nothing if translation is right. The others have only the first
tokens of the vocabulary: the same weights, which were not trained to see words in those pieces. So that is the cost for
such a draft, not for one that was trained with its vocabulary. Tokens are compared with those without a draft.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.arguments import Parser, positive
from benchmarks.contenders import encode
from benchmarks.keeping import kept
from tandem.checkpoints.locate import embedded_draft
from tandem.comparison.measuring.environment import these_versions, this_machine
from tandem.comparison.measuring.workloads import built_in_prompts
from tandem.engine.batcher import Batcher
from tandem.engine.generators import fused_generator
from tandem.engine.loading import load_pair
from tandem.engine.model_config import DraftChoice, ModelConfig
from tandem.runners.loading import Execution, Shape
from tandem.speculation.types import Chunk, GenerationEnd, GenerationRequest

SPECIAL = 17
"""The first ids of SmolLM2's vocabulary are special tokens."""
SHIPPED, NONE = "shipped", "none"


@dataclass(frozen=True, slots=True)
class Answered:
    """What one prompt came to with one draft."""

    draft: str
    prompt: str
    token_ids: tuple[int, ...]
    rounds: int
    drafted: int
    accepted: int


def write_foreign(folder: Path, tokens: int | None = None, padding: int = 0, weights: bool = True) -> Path:
    """Writes the shipped draft with its first `tokens` tokens, all if None, by other ids, and rows that are padding."""
    from safetensors.numpy import load_file, save_file

    source = Path(str(embedded_draft()))
    said = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary: dict[str, int] = said["model"]["vocab"]
    order = [token for token in vocabulary.values() if token < (tokens or len(vocabulary))]
    order = [*sorted(order)[:SPECIAL], *sorted(order)[: SPECIAL - 1 : -1]]  # the ordinary ones backwards
    place = {token: at for at, token in enumerate(order)}
    kept_tokens = {text: place[token] for text, token in vocabulary.items() if token in place}
    merges = [each.split(" ") if isinstance(each, str) else each for each in said["model"]["merges"]]
    merges = [each for each in merges if {*each, "".join(each)} <= kept_tokens.keys()]
    said["model"] |= {"vocab": kept_tokens, "merges": merges}
    config = json.loads((source / "config.json").read_text(encoding="utf-8")) | {"vocab_size": len(order) + padding}
    folder.mkdir(parents=True, exist_ok=True)
    if weights:
        tensors = load_file(source / "model.safetensors")
        rows = tensors["model.embed_tokens.weight"][order]
        tensors["model.embed_tokens.weight"] = np.concatenate([rows, np.zeros_like(rows[:padding])])
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "tokenizer.json").write_text(json.dumps(said), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    for name in ("tokenizer_config.json", "generation_config.json", "chat_template.jinja"):
        (folder / name).write_bytes((source / name).read_bytes())
    return folder


async def answers(name: str, draft: str, args: argparse.Namespace) -> list[Answered]:
    """Answers all prompts with one draft beside the embedded target."""
    prompts = encode(built_in_prompts(per_workload=args.prompts_per_workload))
    models = ModelConfig(
        execution=Execution("cpu", args.dtype, 2, "auto"),
        shape=Shape(slots=1, max_length=1024, max_draft=args.draft_tokens),
        draft=DraftChoice("model", draft, foreign=True),
        default_k=args.draft_tokens,
    )
    batcher, found = Batcher("models"), list[Answered]()
    try:
        target, loaded = await load_pair(models, batcher)
        generator = fused_generator(target, loaded, models.default_k, models.draft)
        for prompt, token_ids in prompts.items():
            for k in (0, args.draft_tokens) if name == SHIPPED else (args.draft_tokens,):
                request = GenerationRequest(
                    token_ids=tuple(token_ids), max_new_tokens=args.max_new_tokens, speculation_length=k
                )
                tokens: list[int] = []
                async for event in generator.generate(request):
                    if isinstance(event, Chunk):
                        tokens += event.token_ids
                    elif isinstance(event, GenerationEnd):
                        stats = event.stats
                        counts = (stats.rounds, stats.drafted, stats.accepted)
                        found.append(Answered(name if k else NONE, prompt, tuple(tokens), *counts))
    finally:
        await batcher.close()
    return found


def lines(found: Sequence[Answered]) -> Iterator[str]:
    """One line for each draft: its acceptance rate, tokens per round, and on how many prompts tokens are the same."""
    yield f"{'draft':24} {'accepted':>9} {'tokens/round':>12}  same tokens"
    truth = {one.prompt: one.token_ids for one in found if one.draft == NONE}
    for name in dict.fromkeys(one.draft for one in found if one.draft != NONE):
        own = [one for one in found if one.draft == name]
        rate = sum(one.accepted for one in own) / max(1, sum(one.drafted for one in own))
        length = sum(len(one.token_ids) for one in own) / max(1, sum(one.rounds for one in own))
        same = sum(one.token_ids == truth.get(one.prompt) for one in own)
        yield f"{name:24} {rate:9.3f} {length:12.2f}  {same} of {len(own)}"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog="benchmarks.foreign_draft", description="What a foreign vocabulary costs in acceptance.")
    parser.flag("--prompts-per-workload", type=positive, default=2, metavar="N")
    parser.flag("--max-new-tokens", type=positive, default=64, metavar="N")
    parser.flag("--draft-tokens", type=positive, default=3, metavar="N")
    parser.flag("--dtype", choices=("bfloat16", "float32"), default="float32")
    parser.flag("--output", type=Path, default=Path("results/foreign_draft.json"), metavar="FILE")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args, found = parse(argv), list[Answered]()

    def raw() -> dict[str, Any]:
        return {"answered": [asdict(one) for one in found]}

    def document() -> dict[str, Any]:
        return {"machine": asdict(this_machine()), "versions": these_versions(), "lines": list(lines(found)), **raw()}

    with tempfile.TemporaryDirectory(prefix="foreign-draft") as folder, kept(args.output, document, raw):
        sizes = {"other ids": None, "32,768 of 49,152 tokens": 32768, "16,384 of 49,152 tokens": 16384}
        found += asyncio.run(answers(SHIPPED, str(embedded_draft()), args))
        for name, tokens in sizes.items():
            found += asyncio.run(answers(name, str(write_foreign(Path(folder) / str(tokens), tokens)), args))
    print("\n".join(lines(found)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
