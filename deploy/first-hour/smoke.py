"""Ten minutes before anything is fetched: does this device run Tandem's graphs, and with the CPU's tokens?

    python deploy/first-hour/smoke.py neuron --folder /tmp/smoke                                        # one core
    python -m torch.distributed.run --nproc-per-node 2 deploy/first-hour/smoke.py neuron --ranks 2 ...  # two ranks
    python deploy/first-hour/smoke.py nxdi --ranks 2 --folder /tmp/smoke     # NxD Inference, one process
    python deploy/first-hour/smoke.py cpu --folder /tmp/smoke                # a rehearsal: graphs traced, not compiled

Makes a random pair of two layers, runs a prefill, verifications, and fused rounds, and compares the tokens with
transformers' own on the CPU. Prints seconds for each graph, the operators that fell back, and versions.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

PROMPT, COUNT, DRAFTS = tuple(range(5, 45)), 24, 3
PACKAGES = ("torch", "torch-neuronx", "neuronx-cc", "nki", "neuronx-distributed-inference", "transformers")
Runners = tuple[Any, Any]


def make_pair(folder: Path, kind: str) -> tuple[Path, Path]:
    """Returns the folders of a random target (Qwen3; Llama for NxD Inference) and of a draft: the target with noise."""
    from tandem.checkpoints.trusted_cache import made_once

    name = "Llama" if kind == "nxdi" else "Qwen3"
    made = made_once(folder, f"smoke-{name}", "making a random pair", partial(write_pair, name))
    return made / "target", made / "draft"


def write_pair(name: str, folder: Path) -> None:
    import torch
    import transformers

    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 8}
    more = {"num_key_value_heads": 4, "head_dim": 32, "vocab_size": 1024, "max_position_embeddings": 512}
    # a wide spread: the best token must be best by more than rounding
    config = getattr(transformers, f"{name}Config")(**sizes, **more, initializer_range=0.2, eos_token_id=None)
    torch.manual_seed(0)
    module = getattr(transformers, f"{name}ForCausalLM")(config)
    module.save_pretrained(folder / "target")
    for parameter in module.parameters():
        parameter.data += 0.01 * torch.randn_like(parameter)
    module.save_pretrained(folder / "draft")


def expected(target: Path) -> tuple[list[int], list[float]]:
    """transformers' greedy tokens on the CPU in float32, and by how much each logit is above the second."""
    import torch
    from transformers import AutoModelForCausalLM

    module = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    ids = torch.tensor([PROMPT])
    with torch.no_grad():
        tokens = module.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=COUNT, do_sample=False, pad_token_id=0
        )[0]
        best = module(tokens[None]).logits[0, len(PROMPT) - 1 : -1].topk(2).values
    return tokens[len(PROMPT) :].tolist(), (best[:, 0] - best[:, 1]).tolist()


def rehearsed() -> None:
    """The CPU under Trainium's rules: graphs alone, traced whole by dynamo and run by its backend "eager"."""
    from tandem.runners.torch import platforms

    there = replace(platforms.NEURON, name="cpu", device="cpu", absent=lambda: None, backend="eager", cores=None)
    cpu = replace(there, core_per_rank=False, code=None, environment={}, collectives="gloo")
    platforms.PLATFORMS["cpu"] = cpu


def load(kind: str, target: Path, draft: Path, ranks: int, done: Callable[[str], None]) -> Runners:
    """Loads and compiles target, draft and their fused graph; `done` reports progress. Raises what compiling raises."""
    from tandem.checkpoints.locate import find
    from tandem.runners.backends import LoadRequest, backend_named
    from tandem.runners.load_runner import Execution, Shape, prepared_platform
    from tandem.runners.startup import Startup
    from tandem.runners.torch.tensor_parallel import RankLink, Ranks

    startup, shape = Startup(), Shape(slots=1, max_length=128, max_draft=DRAFTS, chunk=32)
    backend, here = backend_named("nxdi" if kind == "nxdi" else "torch"), Ranks.from_environment(ranks)
    backend.require()
    checkpoints = find(str(target)), find(str(draft))
    if kind == "nxdi":
        from tandem_nxdi.nxdi_settings import NxdiSettings

        settings = NxdiSettings(ranks, compiled_dir=str(target.parents[1] / "smoke-compiled"), pair="fused")
        request = LoadRequest(Execution("auto", "float32"), shape, settings)
        pair = backend.load_pair(*checkpoints, request, startup)
        done("compiled and loaded as one graph")
    else:
        execution = Execution(kind, "float32", cores="0" if kind == "neuron" and ranks == 1 else None, tp_degree=ranks)
        if ranks > 1:
            RankLink.join(prepared_platform(execution), here)
        request = LoadRequest(execution, shape)
        first = backend.load(checkpoints[0], request, startup)
        pair = first, backend.load(checkpoints[1], replace(request, verifies=False), startup)
        done("weights loaded")
    for runner in pair:
        runner.warm_up(startup)
    done("every graph ran once")
    if kind != "nxdi":
        pair[0].capabilities.fuse(pair[1], startup)
        done("the fused graph ran once")
    for line in startup.notes:
        print(line)
    if pair[0].fused_with(pair[1]) is None:
        raise RuntimeError("there is no fused graph: " + "; ".join(startup.notes))
    return pair


def decode(runners: Runners, step: Callable[[list[int]], Sequence[int]]) -> list[int]:
    """Prefills the prompt into slot 0 of each runner, and takes rounds until COUNT tokens are there."""
    from tandem.runners.protocol import PrefillRow

    for runner, kept in zip(runners, (1, 2), strict=True):
        for start in range(0, len(PROMPT) - kept, 32):
            runner.prefill([PrefillRow(0, start, PROMPT[: len(PROMPT) - kept][start : start + 32])])
    tokens = list(PROMPT)
    while len(tokens) < len(PROMPT) + COUNT:
        tokens += step(tokens)
    return tokens[len(PROMPT) :][:COUNT]


def verified(runners: Runners, tokens: list[int]) -> Sequence[int]:
    """Verifies wrong drafts; returns the committed tokens."""
    from tandem.runners.protocol import VerifyRow
    from tandem.speculation.types import Request

    (verdict,) = runners[0].verify([VerifyRow(0, len(tokens) - 1, tokens[-1], (1, 2, 3), Request())])
    return _tokens(verdict)


def fused(runners: Runners, tokens: list[int]) -> Sequence[int]:
    """Runs one fused round; returns the committed tokens."""
    from tandem.runners.protocol import FusedRow, ProposeRow
    from tandem.speculation.types import Request

    row = FusedRow(ProposeRow(0, len(tokens) - 1, tuple(tokens[-2:]), DRAFTS, Request()))
    (result,) = runners[0].fused_with(runners[1])([row])
    return _tokens(result if isinstance(result, Exception) else result.verdict)


def _tokens(verdict: Any) -> Sequence[int]:
    if isinstance(verdict, Exception):
        raise verdict
    return verdict.token_ids  # type: ignore[no-any-return]


def difference(name: str, found: list[int], wanted: list[int], margins: list[float]) -> str | None:
    """A line on the first token that is not the CPU's."""
    for at, (ours, theirs, margin) in enumerate(zip(found, wanted, margins, strict=True)):
        if ours != theirs:
            return f"wrong token: {name} says {ours} at {at} where the CPU says {theirs}, best there by {margin:.3g}"
    return None


def report() -> None:
    """Versions, and what ran outside the graphs."""
    for package in PACKAGES:
        try:
            print(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    here = sys.modules.get("torch_neuronx")
    if names := getattr(here, "get_fallback_ops", None):
        print(f"operators that fell back to the CPU: {', '.join(map(str, names())) or 'none'}")


def parse(argv: list[str] | None) -> argparse.Namespace:
    words = argparse.ArgumentParser(prog="smoke.py", description=(__doc__ or "").partition("\n")[0])
    words.add_argument("kind", choices=("neuron", "nxdi", "cpu"), help="where it runs; cpu: a rehearsal")
    words.add_argument("--folder", type=Path, required=True, help="where the random pair and the compiler's logs go")
    words.add_argument("--ranks", type=int, default=1, help="cores (default: 1)")
    return words.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    from tandem.runners.load_runner import transformers_logging

    args = parse(argv)
    transformers_logging()
    if os.environ.get("RANK", "0") != "0":
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  (errors of all ranks, output of one)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    os.environ.setdefault("TORCH_NEURONX_DEBUG_DIR", str(args.folder / "smoke-compiler"))
    os.environ.setdefault("TORCH_NEURONX_PRESERVE_COMPILATION_ARTIFACTS", "1")
    began = time.monotonic()

    def done(what: str) -> None:
        print(f"[{time.monotonic() - began:.1f} s] {what}", flush=True)

    target, draft = make_pair(args.folder, args.kind)
    wanted, margins = expected(target)
    done(f"random pair made; the CPU says {wanted[:4]} ...")
    if args.kind == "cpu":
        rehearsed()
        print("REHEARSAL: graphs are traced and run on the CPU; nothing is compiled")
    runners = load(args.kind, target, draft, args.ranks, done)
    wrong = []
    for name, step in {"a verification": verified, "a fused round": fused}.items():
        found = decode(runners, lambda tokens, step=step: step(runners, tokens))
        done(f"{COUNT} tokens by {name} at a time")
        wrong += [line for line in [difference(name, found, wanted, margins)] if line]
    print("\n".join(wrong) or f"smoke passed: {COUNT} of {COUNT} tokens are the CPU's, --ranks {args.ranks}")
    report()
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
