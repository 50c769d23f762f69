"""Runs an EAGLE-3 head as Tandem writes it in vLLM's CPU build, beside vLLM without it and beside Tandem.

    .venv/bin/python -m benchmarks.head_in_vllm --vllm-python .venv-vllm/bin/python [--dtype bfloat16]

The head is written in each public layout. Shown are its acceptance in either engine, greedy, past ends of sequence, and
whether each output is that of vLLM without speculation. Nothing here is timed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import vllm_peer
from benchmarks.arguments import Parser, positive
from benchmarks.contenders import encode
from benchmarks.peers import PeerFailed
from tandem.checkpoints.gguf_cache import unpacked
from tandem.checkpoints.head_config import LAYOUTS
from tandem.checkpoints.locate import CheckpointError, embedded_head, find
from tandem.comparison.measuring.workloads import built_in_prompts
from tandem.engine.batcher import Batcher
from tandem.engine.generator import Generator
from tandem.engine.generators import fused_generator
from tandem.engine.loading import load_pair
from tandem.engine.model_config import DraftChoice, ModelConfig
from tandem.runners.eagle.files import read_head, write_head
from tandem.runners.loading import Execution, Shape
from tandem.speculation.types import Chunk, GenerationRequest, SpeculationStats

LONGEST = 1024  # tokens of a sequence
OURS, PLAIN = "Tandem", "vLLM"
Outputs = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Found:
    """What one engine made of the prompts. `accepted`: rounds in which at least the first 1, 2, ... drafts were."""

    name: str
    outputs: Outputs
    rounds: int
    accepted: tuple[int, ...]

    @property
    def mean_length(self) -> float:
        """Tokens that a round with drafts commits, the target's own included."""
        return 1 + sum(self.accepted) / self.rounds

    def line(self, plain: Outputs) -> str:
        """The engine's acceptance, and on how many prompts its tokens are those of `plain`."""
        same = sum(self.outputs[name] == tokens for name, tokens in plain.items())
        if not self.rounds:
            return f"{self.name:24} {'-':>6} {'-':>8}  {same} of {len(plain)} as {PLAIN}'s"
        shares = " ".join(f"{count / self.rounds:.3f}" for count in self.accepted)
        return f"{self.name:24} {self.rounds:6} {self.mean_length:8.3f}  {same} of {len(plain)} as {PLAIN}'s  {shares}"


async def in_vllm(args: argparse.Namespace, name: str, head: str | None, prompts: Mapping[str, list[int]]) -> Found:
    """Answers every prompt, alone, in a vLLM of its own. Raises PeerFailed."""
    eagle = {"method": "eagle3", "model": head, "num_speculative_tokens": args.draft_tokens}
    asked = vllm_peer.settings(unpacked(find(args.target_model)).folder, LONGEST, 1, eagle if head else None)
    command, env = [args.vllm_python, str(vllm_peer.WORKER)], vllm_peer.environment(args.vllm_python, args.threads)
    log = Path(args.logs) / f"{name.replace(' ', '-')}.log"
    peer = vllm_peer.Peer(name, command, env, log)
    try:
        print(name, await peer.start({**asked, "dtype": args.dtype, "enforce_eager": True, "disable_log_stats": False}))
        outputs = {key: (await peer.answer(ids, args.max_new_tokens)).token_ids for key, ids in prompts.items()}
        counted = await peer.counted()
    finally:
        await peer.stop()
    return Found(name, outputs, counted.get("num_drafts", 0), tuple(counted.get("num_accepted_tokens_per_pos", ())))


@contextlib.asynccontextmanager
async def pair(args: argparse.Namespace, head: str) -> AsyncIterator[Generator]:
    """Tandem's target and head, as fused_target runs them."""
    choice = DraftChoice("eagle", head)
    execution = Execution("cpu", args.dtype, args.threads, weights=args.dtype)
    shape = Shape(slots=1, max_draft=args.draft_tokens, max_length=LONGEST)
    batcher = Batcher("head in vllm")
    try:
        config = ModelConfig(execution, shape, args.target_model, choice, default_k=args.draft_tokens)
        target, draft = await load_pair(config, batcher)
        yield fused_generator(target, draft, args.draft_tokens, choice)
    finally:
        await batcher.close()


async def in_tandem(args: argparse.Namespace, head: str, prompts: Mapping[str, list[int]]) -> Found:
    """Answers every prompt, alone, with the same head beside a target of ours."""
    outputs: dict[str, tuple[int, ...]] = {}
    rounds, accepted = 0, [0] * args.draft_tokens
    async with pair(args, head) as generator:
        for name, ids in prompts.items():
            stats = SpeculationStats()
            tokens: list[int] = []
            request = GenerationRequest(
                token_ids=tuple(ids), max_new_tokens=args.max_new_tokens, ignore_end_of_sequence=True
            )
            async for part in generator.generate(request, stats):
                tokens += part.token_ids if isinstance(part, Chunk) else ()
            outputs[name], rounds = tuple(tokens), rounds + stats.drafted_per_position[0]
            for at, count in enumerate(stats.accepted_per_position):
                accepted[at] += count
    return Found(OURS, outputs, rounds, tuple(accepted))


async def compare(args: argparse.Namespace, show: Callable[[str], None]) -> dict[str, Any]:
    """Runs all engines, one after the other, and shows a line of each. Raises PeerFailed and CheckpointError."""
    prompts = encode(built_in_prompts(per_workload=args.prompts_per_workload), args.target_model)
    plain = await in_vllm(args, PLAIN, None, prompts)
    found = [plain, await in_tandem(args, args.head, prompts)]
    head, embedding = read_head(Path(args.head))
    for layout in args.layouts:
        folder = Path(args.logs) / layout
        write_head(folder, head, layout, embedding, verifier=find(args.target_model).name)
        found.append(await in_vllm(args, f"{PLAIN}, {layout}", str(folder), prompts))
    show(f"{'':24} {'rounds':>6} {'a round':>8}  outputs, and share of rounds with drafts 1, 2, ... accepted")
    for one in found:
        show(one.line(plain.outputs))
    return {one.name: asdict(one) for one in found}


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog="python -m benchmarks.head_in_vllm", description=__doc__, allow_abbrev=False)
    parser.flag("--head", default=embedded_head(), help="a head's folder (default: the embedded target's)")
    parser.flag("--target-model", help="its target (default: the embedded one)")
    parser.flag("--vllm-python", default=os.environ.get(vllm_peer.VARIABLE), metavar="PROGRAM")
    parser.flag("--layouts", default=",".join(LAYOUTS))
    parser.flag("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.flag("--draft-tokens", type=positive, default=4, metavar="K")
    parser.flag("--max-new-tokens", type=positive, default=64, metavar="N")
    parser.flag("--prompts-per-workload", type=positive, metavar="N", help="default: all")
    parser.flag("--threads", type=positive, default=1, help="of either engine (default 1)")
    parser.flag("--logs", help="folder of vLLM's logs and of the written heads (default: one that is removed)")
    parser.flag("--output", type=Path, metavar="FILE", help="writes tokens and counts as JSON")
    args = parser.parse_args(argv)
    args.layouts = args.layouts.split(",")
    if unknown := set(args.layouts) - set(LAYOUTS):
        parser.error(f"--layouts: {min(unknown)!r} is not one of {', '.join(LAYOUTS)}")
    if not args.head:
        parser.error("--head: none is shipped here")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parsed(argv)
    if why := vllm_peer.absence(args.vllm_python):
        print(why, file=sys.stderr)
        return 2
    with contextlib.ExitStack() as stack:
        args.logs = args.logs or stack.enter_context(tempfile.TemporaryDirectory())
        Path(args.logs).mkdir(parents=True, exist_ok=True)
        try:
            found = asyncio.run(compare(args, lambda line: print(line, flush=True)))
        except (PeerFailed, CheckpointError, ValueError) as error:
            print(f"head_in_vllm: {error}", file=sys.stderr)
            return 1
    if args.output:
        args.output.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
