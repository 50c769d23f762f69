"""Measures an EAGLE-1 head by module code and writes its model card.

    python -m tandem.training.heads.eagle1.evaluate --draft_model HEAD [--target_model T] [--k 4]

The target continues the built-in prompts greedily, and rounds of the head are simulated along its text. Which tokens
are accepted does not depend on who runs the head, up to rounding; how fast it is does, and is not measured here.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tandem.checkpoints.gguf_cache import unpacked
from tandem.checkpoints.locate import find, weights_revision
from tandem.checkpoints.tokenizers import HuggingFaceTokenizer
from tandem.comparison.measuring.workloads import Prompt, built_in_prompts
from tandem.training.heads.eagle1.card import eagle1_card
from tandem.training.heads.eagle1.loss import FrozenTarget
from tandem.training.heads.eagle1.module import read_eagle1
from tandem.training.heads.eagle1.rounds import Rounds, rounds_along
from tandem.training.heads.eagle1.train import frozen

ALL = "all"


@dataclass(frozen=True, slots=True)
class Eagle1Evaluation:
    """What to measure: rounds of `k` draft tokens along `max_new_tokens` of each prompt."""

    head: Path
    target: str | None = None
    prompts: tuple[Prompt, ...] = built_in_prompts()
    k: int = 4
    max_new_tokens: int = 64
    device: str = "cpu"

    def __post_init__(self) -> None:
        for name in ("k", "max_new_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)} is below 1")


def evaluate(config: Eagle1Evaluation, show: Callable[[str], None]) -> dict[str, Any]:
    """Measures; writes and returns the figures (acceptance.json), and writes the card too. Raises ValueError."""
    from transformers import AutoModelForCausalLM

    from tandem.runners.loading import transformers_logging

    transformers_logging()
    training = json.loads(_training_file(config.head).read_text())
    checkpoint = unpacked(find(config.target))
    if (revision := weights_revision(checkpoint)) != training["target"]:
        raise ValueError(f"target_model: {config.head} was trained for {training['target']}, not {revision}")
    module: Any = AutoModelForCausalLM.from_pretrained(**checkpoint.source, dtype=torch.float32)
    module = module.to(config.device).requires_grad_(False).eval()
    head = read_eagle1(config.head).to(config.device)
    target = frozen(module, [module.config.num_hidden_layers], config.device)
    tokenizer, kinds = HuggingFaceTokenizer(checkpoint), {ALL: Rounds(config.k)}
    for number, prompt in enumerate(config.prompts, 1):
        show(f"{prompt.name} ({number} of {len(config.prompts)})")
        ids = tokenizer.encode(prompt.text, prompt.chat)
        tokens = continued(module, ids, config.max_new_tokens, config.device)
        rounds = rounds_along(head, target, tokens, hidden_states(module, tokens, target), len(ids), config.k)
        for name in (f"{prompt.kind}, {'chat' if prompt.chat else 'raw'}", ALL):
            kinds.setdefault(name, Rounds(config.k)).include(rounds)
    figures = _figures(config, checkpoint.name, revision, kinds)
    (config.head / "acceptance.json").write_text(json.dumps(figures, indent=1) + "\n")
    (config.head / "README.md").write_text(eagle1_card(figures, training))
    return figures


def _training_file(folder: Path) -> Path:
    file = folder / "training.json"
    if not file.is_file():
        raise ValueError(f"{file}: missing; tandem.training.heads.eagle1.train writes it")
    return file


@torch.no_grad()
def continued(module: Any, ids: Sequence[int], count: int, device: str) -> list[int]:
    """The prompt, and `count` tokens more, as many as there is room for: the target's likeliest, one after another."""
    from transformers import GenerationConfig

    room = int(module.config.max_position_embeddings) - len(ids)
    asked = GenerationConfig(max_new_tokens=max(1, min(count, room)), do_sample=False, pad_token_id=0)
    given = torch.tensor([list(ids)], device=device)
    out = module.generate(given, attention_mask=torch.ones_like(given), generation_config=asked)
    tokens: list[int] = out[0].tolist()
    return tokens


@torch.no_grad()
def hidden_states(module: Any, tokens: Sequence[int], target: FrozenTarget) -> Tensor:
    """The target's hidden states after its last norm, [tokens, hidden]."""
    states: Tensor = module.base_model(torch.tensor([list(tokens)], device=target.output.device)).last_hidden_state
    return states[0]


def _figures(config: Eagle1Evaluation, name: str, revision: str, kinds: dict[str, Rounds]) -> dict[str, Any]:
    return {
        "kind": "eagle1",
        "target": name,
        "weights_revision": revision,
        "temperature": 0.0,
        "dtype": "float32",
        "device": config.device,
        "k": config.k,
        "max_new_tokens": config.max_new_tokens,
        "kinds": {
            kind: {
                "tokens": one.tokens,
                "rounds": one.rounds,
                "by_position": one.by_position,
                "tokens_per_round": one.tokens_per_round,
            }
            for kind, one in kinds.items()
        },
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Measures an EAGLE-1 head and writes its model card.")
    parser.add_argument("--draft_model", "--draft-model", type=Path, required=True, help="folder that train wrote")
    parser.add_argument("--target_model", "--target-model", help="target (default: the embedded one)")
    parser.add_argument("--k", type=int, default=4, help="draft tokens of a round (default 4)")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    args = parser.parse_args(argv)
    try:
        config = Eagle1Evaluation(
            args.draft_model, args.target_model, k=args.k, max_new_tokens=args.max_new_tokens, device=args.device
        )
        found = evaluate(config, lambda line: print(line, file=sys.stderr, flush=True))
    except ValueError as error:
        print(f"evaluate: {error}", file=sys.stderr)
        return 2
    print(json.dumps(found["kinds"][ALL]))
    print(f"wrote {args.draft_model / 'README.md'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
