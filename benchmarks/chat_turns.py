"""Measures how much of a chat is cached when its next turn begins: `python -m benchmarks.chat_turns`.

Chats of three turns go to `tandem serve` by the `openai` package. Of each turn: tokens of its prompt, how many of them
were cached (prompts and answers of the turns before, in whole pages of 16 tokens), tokens of its answer, and time to
first token.
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
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import openai

from benchmarks.arguments import Parser, positive
from tandem.comparison.measuring.environment import these_versions, this_machine
from tandem.comparison.measuring.servers import Fleet
from tandem.launch import LAUNCH

TOPICS = ("rivers", "bread", "bicycles", "the moon", "gardens", "trains", "honey bees", "lighthouses", "warm clothes")
QUESTIONS = ("Tell me something about {}.", "Why is that so?", "Give me an example of it, please.")
BEGINS_ANEW = "You answer questions about {} in plain words."


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn of a chat, counted from 1, in tokens and milliseconds."""

    chat: int
    turn: int
    prompt: int
    cached: int
    answer: int
    first_ms: float


async def chat(client: openai.AsyncOpenAI, model: str, number: int, tokens: int) -> list[Turn]:
    """Runs one chat, which has nothing in common with the others but what the template begins with."""
    topic, turns = f"{TOPICS[number % len(TOPICS)]}, part {number}", list[Turn]()
    messages: list[Any] = [{"role": "system", "content": BEGINS_ANEW.format(topic)}]
    for turn, question in enumerate(QUESTIONS, 1):
        messages.append({"role": "user", "content": question.format(topic)})
        usage: Any = None
        began, first, text = time.perf_counter(), 0.0, ""
        options: Any = {"stream": True, "stream_options": {"include_usage": True}}
        events: Any = await client.chat.completions.create(
            model=model, messages=messages, max_tokens=tokens, temperature=0, **options
        )
        async for event in events:
            if event.choices and event.choices[0].delta.content:
                first = first or time.perf_counter()
                text += event.choices[0].delta.content
            usage = event.usage or usage
        details = usage.prompt_tokens_details
        cached = (details.cached_tokens or 0) if details else 0
        turns.append(Turn(number, turn, usage.prompt_tokens, cached, usage.completion_tokens, 1000 * (first - began)))
        messages.append({"role": "assistant", "content": text})
    return turns


async def measure(args: argparse.Namespace) -> list[Turn]:
    """Starts a server, and runs the chats one after the other. The first one only warms up."""
    with tempfile.TemporaryDirectory(prefix="tandem-") as folder:
        async with Fleet(Path(folder)) as fleet:
            command = [*LAUNCH, "--role", "serve", "--http_port", "0", "--drain_seconds", "1"]
            await fleet.start("server", [*command, *shlex.split(args.server_flags)])
            url = f"http://127.0.0.1:{json.loads((Path(folder) / 'server.ready.json').read_text())['http_port']}/v1"
            async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=300) as client:
                model = (await client.models.list()).data[0].id
                chats = [await chat(client, model, number, args.max_new_tokens) for number in range(args.chats + 1)]
    return [turn for turns in chats[1:] for turn in turns]


def report(found: Sequence[Turn]) -> list[str]:
    lines = []
    for number in range(1, len(QUESTIONS) + 1):
        turns = [turn for turn in found if turn.turn == number]
        prompt, cached, first = (
            statistics.median(getattr(turn, of) for turn in turns) for of in ("prompt", "cached", "first_ms")
        )
        lines.append(f"turn {number}: {cached:.0f} of {prompt:.0f} prompt tokens cached, first token in {first:.0f} ms")
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="chat_turns", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.flag("--chats", type=positive, default=8, metavar="N", help="(default: 8)")
    parser.flag("--max-new-tokens", type=positive, default=90, metavar="N", help="of each answer (default: 90)")
    parser.flag("--server-flags", default="", help="further flags of the server")
    parser.flag("--output", type=Path, default=Path("results/chat_turns.json"), help="(default: %(default)s)")
    args = parser.parse_args(argv)
    found = asyncio.run(measure(args))
    args.output.parent.mkdir(parents=True, exist_ok=True)
    place = {"machine": asdict(this_machine()), "versions": asdict(these_versions())}
    document = {**place, "turns": [asdict(turn) for turn in found], "report": report(found)}
    args.output.write_text(json.dumps(document, indent=1) + "\n")
    print("\n".join(report(found)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
