"""Measures what HTTP for OpenAI clients adds to TTFT and TPOT: a server's own port, and the gateway.

    .venv/bin/python -m benchmarks.gateway_overhead --prompts 12 --repeats 5

One fused server answers the same prompts in four ways, in turn: *direct*, our own gRPC service; *http*, its own HTTP
port; *engine*, the gateway's worker protocol without the gateway, which shows our part; *gateway*, HTTP through smg.
Differences are between requests of the same prompt and turn. `--server-flags "--backend toy"` leaves the model out.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import vllm_engine_pb2_grpc

from tandem.comparison.measuring.environment import these_versions, this_machine
from tandem.comparison.measuring.servers import Fleet
from tandem.comparison.measuring.workloads import built_in_prompts
from tandem.launch import LAUNCH
from tandem.rpc.channel import FUSED, open_channel
from tandem.rpc.generation_client import GenerationClient
from tandem.speculation.types import Chunk, GenerationEnd, GenerationRequest

DIRECT, HTTP, ENGINE, GATEWAY = "direct", "http", "engine", "gateway"
WAYS = (DIRECT, HTTP, ENGINE, GATEWAY)
BARS_MS = {HTTP: {"ttft": 2.0, "tpot": 0.1}, GATEWAY: {"ttft": 5.0, "tpot": 0.3}}


@dataclass(frozen=True, slots=True)
class TimedAnswer:
    """One request: seconds to the first token, seconds for each later token, and the number of tokens."""

    way: str
    prompt: int
    turn: int
    ttft: float
    tpot: float
    tokens: int


Way = Callable[[str, int], Awaitable[tuple[float, float, float, int]]]
"""Asks for tokens of a prompt; returns the times of asking, of the first token and of the end, and how many came."""


def direct(client: GenerationClient) -> Way:
    async def ask(prompt: str, tokens: int) -> tuple[float, float, float, int]:
        request = GenerationRequest(text=prompt, max_new_tokens=tokens, ignore_end_of_sequence=True)
        began, first, count = time.perf_counter(), 0.0, 0
        async for event in client.generate(request):
            if isinstance(event, Chunk):
                first = first or time.perf_counter()
                count += len(event.token_ids)
            assert isinstance(event, (Chunk, GenerationEnd))
        return began, first, time.perf_counter(), count

    return ask


def engine(stub: vllm_engine_pb2_grpc.VllmEngineStub) -> Way:
    async def ask(prompt: str, tokens: int) -> tuple[float, float, float, int]:
        sampling = pb.SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        began, first, count = time.perf_counter(), 0.0, 0
        async for reply in stub.Generate(pb.GenerateRequest(text=prompt, stream=True, sampling_params=sampling)):
            if reply.HasField("chunk"):
                first = first or time.perf_counter()
                count = reply.chunk.completion_tokens
        return began, first, time.perf_counter(), count

    return ask


def http(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, model: str) -> Way:
    async def ask(prompt: str, tokens: int) -> tuple[float, float, float, int]:
        body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        sent = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}}).encode()
        headers = f"host: benchmark\r\ncontent-type: application/json\r\ncontent-length: {len(sent)}\r\n\r\n"
        began, first, count = time.perf_counter(), 0.0, 0
        writer.write(f"POST /v1/completions HTTP/1.1\r\n{headers}".encode() + sent)
        while (line := (await reader.readline()).strip()) != b"data: [DONE]":
            if not line.startswith(b"data: "):
                assert not line.startswith(b"HTTP/1.1") or b" 200 " in line, line
                continue
            event = json.loads(line[6:])
            if event.get("usage"):
                count = event["usage"]["completion_tokens"]
            elif event["choices"]:
                first = first or time.perf_counter()
        ended = time.perf_counter()
        while await reader.readline() != b"0\r\n":  # the end of the chunked body
            pass
        await reader.readline()
        return began, first, ended, count

    return ask


async def measure(ways: dict[str, Way], prompts: Sequence[str], tokens: int, repeats: int) -> list[TimedAnswer]:
    """Asks every way in turn; who comes first changes with each prompt. The first turn only warms up."""
    found: list[TimedAnswer] = []
    for turn in range(repeats + 1):
        for i, prompt in enumerate(prompts):
            order = list(ways)[(turn + i) % len(ways) :] + list(ways)[: (turn + i) % len(ways)]
            for way in order:
                began, first, ended, count = await ways[way](prompt, tokens)
                if turn:
                    later = (ended - first) / max(1, count - 1)
                    found.append(TimedAnswer(way, i, turn, first - began, later, count))
    return found


def added(found: Sequence[TimedAnswer], way: str, figure: str) -> list[float]:
    """Returns what `way` adds to `figure` over the direct call of the same prompt and turn, in ms."""
    of = {(each.way, (each.prompt, each.turn)): getattr(each, figure) for each in found}
    pairs = sorted({pair for _, pair in of})
    return [1000 * (of[way, pair] - of[DIRECT, pair]) for pair in pairs]


def table(found: Sequence[TimedAnswer]) -> Table:
    """Builds the medians of each way, and what it adds to the direct call: quartiles of the differences."""
    shown = Table("way", "TTFT ms", "added", "p25..p75", "TPOT ms", "added", "p25..p75", title="Ways to one server")
    for way in WAYS:
        row = [way]
        for figure in ("ttft", "tpot"):
            values = [1000 * getattr(each, figure) for each in found if each.way == way]
            low, middle, high = statistics.quantiles(added(found, way, figure), n=4)
            row += [f"{statistics.median(values):.2f}"]
            row += ["-", "-"] if way == DIRECT else [f"{middle:+.2f}", f"{low:+.2f}..{high:+.2f}"]
        shown.add_row(*row)
    return shown


async def run(args: argparse.Namespace) -> list[TimedAnswer]:
    """Starts a server and a gateway, and measures."""
    flags = shlex.split(args.server_flags)
    with tempfile.TemporaryDirectory(prefix="tandem-") as folder:
        async with Fleet(Path(folder)) as fleet:
            command = [*LAUNCH, "--role", "fused_target", "--port", "0", "--engine_port", "0", "--http_port", "0"]
            command += ["--sequence_length", "512", "--prefix_sharing", "off", *flags]
            server = await fleet.start("server", command)
            ready = json.loads((Path(folder) / "server.ready.json").read_text())
            worker = f"127.0.0.1:{ready['engine_port']}"
            command = [*LAUNCH, "--role", "gateway", "--http_port", "0", "--workers", worker]
            smg = await fleet.start("gateway", command)
            model = json.loads((Path(folder) / "gateway.ready.json").read_text())["model"]
            client = GenerationClient.connect(f"127.0.0.1:{server.port}", FUSED)
            connections = [await asyncio.open_connection("127.0.0.1", port) for port in (ready["http_port"], smg.port)]
            async with client, open_channel(worker) as channel:
                stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
                own, through = (http(reader, writer, model) for reader, writer in connections)
                ways = {DIRECT: direct(client), HTTP: own, ENGINE: engine(stub), GATEWAY: through}
                prompts = [prompt.text for prompt in built_in_prompts()][: args.prompts]
                found = await measure(ways, prompts, args.max_new_tokens, args.repeats)
            for _, writer in connections:
                writer.close()
            return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.gateway_overhead", description=__doc__)
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--server-flags", default="", help='flags of the fused server, as in "--backend toy"')
    parser.add_argument("--output", help="JSON file for all samples")
    args = parser.parse_args(argv)
    found = asyncio.run(run(args))
    console = Console()
    console.print(table(found))
    bars: dict[str, Any] = {}
    for way, figures in BARS_MS.items():
        for figure, bar in figures.items():
            median = statistics.median(added(found, way, figure))
            bars[f"{way}_{figure}"] = {"added_ms": median, "bar_ms": bar, "met": median < bar}
            judged = "met" if median < bar else "missed"
            console.print(f"{way} adds {median:.2f} ms to {figure.upper()}: the bar of {bar:g} ms is {judged}")
    if args.output:
        about = {
            "machine": asdict(this_machine()),
            "versions": these_versions(),
            "bars": bars,
            "samples": [asdict(each) for each in found],
        }
        Path(args.output).write_text(json.dumps(about, indent=1, default=str))
    return 0


if __name__ == "__main__":
    sys.exit(main())
