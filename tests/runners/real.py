"""The real pair: SmolLM2-135M-Instruct, and its first layers as a (bad) model draft.

Two targets and a draft stay loaded: in every format together they took a worker 9 GB. Tests of a file that load one
format run one after the other (tests/conftest.py).
"""

from __future__ import annotations

import functools
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tandem.checkpoints.gguf_cache import unpacked
from tandem.checkpoints.locate import Checkpoint, find
from tandem.checkpoints.tensors import save_whole
from tandem.checkpoints.tokenizers import HuggingFaceTokenizer, write_tokenizer
from tandem.runners.load_runner import Execution, Shape, load_runner
from tandem.runners.protocol import VerifyRow
from tandem.speculation.draws import draw
from tandem.speculation.types import SamplingParams
from tests.rows import fill, verify_row

DTYPES = ("bfloat16", "float32")
COMPILE = ("native", "off")
MODULE_LAYERS = 4
"""Layers of the target that run as module code. All 30 take minutes, and have one shape, which decides bits."""
SHAPE = Shape(slots=4, max_length=256, max_draft=5)
GREEDY = SamplingParams()
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, seed=7)
PROMPTS = (
    "Count from 1 to 20, one number per line.",
    "Write a Python function that returns the factorial of n.",
    "Why is the sky blue? Answer in one sentence.",
)


@functools.cache
def checkpoint() -> Checkpoint:
    return unpacked(find(None))


@functools.cache
def tokenizer() -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer(find(None))


@functools.lru_cache(maxsize=2)
def target(dtype: str, compile: str = "native") -> Any:
    """Its runner: a NativeRunner, or a TorchRunner of its first MODULE_LAYERS layers."""
    source = _truncated(MODULE_LAYERS) if compile == "off" else checkpoint()
    return load(source, dtype, compile, verifies=True)


@functools.lru_cache(maxsize=1)
def draft(dtype: str, compile: str = "native", layers: int = 20) -> Any:
    """The target's first `layers` layers: agrees with it now and then, which is all a test wants."""
    return load(_truncated(layers), dtype, compile, verifies=False)


@functools.cache
def _truncated(layers: int) -> Checkpoint:
    """A Hugging Face folder of the target's first `layers` layers, untrained, and its tokenizer."""
    from transformers import AutoModelForCausalLM

    folder = Path(tempfile.mkdtemp(prefix="tandem-draft-"))
    module: Any = AutoModelForCausalLM.from_pretrained(**checkpoint().source, dtype=torch.bfloat16)
    module.base_model.layers = module.base_model.layers[:layers]
    module.config.num_hidden_layers = layers
    save_whole(folder, module.save_pretrained)
    write_tokenizer(find(None), folder)
    return Checkpoint(f"first-{layers}-layers", str(folder))


def execution(form: str, compile: str = "auto") -> Execution:
    """`form`: a dtype, or weights and a dtype, as in "int8/float32"."""
    weights, _, dtype = form.rpartition("/")
    return Execution("cpu", dtype, 2, compile, weights=weights or "auto")


def load(source: Checkpoint, form: str, compile: str, verifies: bool) -> Any:
    runner = load_runner(source, execution(form, compile), SHAPE, verifies)
    runner.warm_up()
    return runner


def logits_of(runner: Any, rows: Sequence[VerifyRow], which: int = 0) -> torch.Tensor:
    """The target's logits [width, vocabulary] of row `which`, as its step gives them."""
    return torch.as_tensor(runner.verify_logits(rows)[which])


def prompt_tokens(text: str) -> list[int]:
    return tokenizer().encode(text, chat=True)


def plain(
    runner: Any, prompt: Sequence[int], count: int, sampling: SamplingParams
) -> tuple[list[int], list[torch.Tensor]]:
    """`count` tokens by plain decoding alone in slot 0, with the logits behind each."""
    fill(runner, 0, prompt[:-1])
    tokens, behind = list(prompt), []
    for _ in range(count):
        logits = logits_of(runner, [verify_row(0, len(tokens) - 1, tokens[-1], (), sampling)])[0].clone()
        behind.append(logits)
        tokens.append(draw(logits.float().numpy(), sampling, len(tokens)))
    return tokens[len(prompt) :], behind


def planted_draft(truth: Sequence[int], k: int, random_: random.Random) -> tuple[int, ...]:
    """The next `k` true tokens, some of them spoilt."""
    return tuple(t if random_.random() < 0.6 else random_.randrange(1000, 40000) for t in truth[:k])
