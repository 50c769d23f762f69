"""Runs client roles at a terminal: concurrent prompts, streamed outputs."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from tandem.clients.completion import Events
from tandem.clients.profile import Profile
from tandem.rpc.credentials import Credentials
from tandem.rpc.endpoint_pool import parse_addresses
from tandem.rpc.logs import printable
from tandem.rpc.request_context import RequestContext, begin, new_id
from tandem.rpc.tracing import open_tracing
from tandem.speculation.types import Chunk, GenerationEnd, GenerationRequest, TokenLogprobs

Generate = Callable[[GenerationRequest], Events]

MAX_AT_ONCE = 64  # concurrent prompts, because a server's queue is limited


@dataclass(frozen=True, slots=True)
class ClientConfig:
    """`reconnect_seconds`: retries of a full or lost server. `connect_seconds`: for a first server to listen.

    token_text: a token's own text; each token is printed on a line.
    """

    address: str
    prompts: tuple[str, ...]
    request: GenerationRequest
    profile: bool = False
    token_text: Callable[[int], str] | None = None
    quiet: bool = False
    json: bool = False
    timeout: float | None = None
    otlp_endpoint: str | None = None
    reconnect_seconds: float = 60.0
    connect_seconds: float = 0.0
    credentials: Credentials = field(default_factory=Credentials)
    receipts: str | None = None

    def __post_init__(self) -> None:
        self.credentials.check(self.address)


async def run_client(config: ClientConfig, service: str | None) -> int:
    """Runs --role client or fused_client; `service` None: detected."""
    from tandem.clients.async_client import AsyncClient

    if len(parse_addresses(config.address)) > 1:
        raise ValueError("target_host: this role calls one server; several are for --role draft and draft_worker")
    waits = {"retry_seconds": config.reconnect_seconds, "wait_seconds": config.connect_seconds}
    async with AsyncClient(config.address, service=service, credentials=config.credentials, **waits) as client:
        await client.model_info()
        return await run_prompts(config, lambda request: client.events(request, config.timeout), client.service)


def write_receipt(folder: Path, number: int, receipt: str) -> Path:
    """Writes the receipt of a prompt, numbered from 0. Raises ValueError."""
    file = folder / f"receipt_{number}.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file.write_text(receipt + "\n", encoding="utf-8")
    except OSError as error:
        raise ValueError(f"receipts: {file}: {error.strerror}") from None
    return file


async def run_prompts(config: ClientConfig, generate: Generate, name: str) -> int:
    """Runs prompts concurrently; returns exit code 1 if any failed."""
    profile = Profile(name.lower()) if config.profile else None
    alone = len(config.prompts) == 1
    turns = asyncio.Semaphore(MAX_AT_ONCE)
    tracing = open_tracing(config.otlp_endpoint, "tandem-client")

    async def in_turn(number: int, prompt: str) -> PromptRun:
        outcome = PromptRun(None if alone else number, config)
        async with turns:
            about = {"tandem.request_id": outcome.request_id, "tandem.asked": name}
            span = tracing.start("request", about) if tracing else None
            begin(RequestContext(outcome.request_id, span))  # every prompt runs in a task of its own
            request = config.request if config.request.messages else replace(config.request, text=prompt)
            try:
                await outcome.run(generate, request)
            finally:
                if span:
                    span.end()
        return outcome

    try:
        outcomes = await asyncio.gather(*(in_turn(i, prompt) for i, prompt in enumerate(config.prompts)))
    finally:
        if tracing:
            tracing.close()
    if not alone and not config.json:
        _print_final(outcomes)
    for number, outcome in enumerate(outcomes):
        if config.receipts is not None and outcome.completion:
            file = write_receipt(Path(config.receipts), number, outcome.completion.receipt)
            print(f"receipt saved to {file}", file=sys.stderr)
    for outcome in outcomes:
        if profile and outcome.completion:
            profile.add(outcome.completion, outcome.seconds, outcome.ttft_seconds)
    for path in profile.write() if profile else ():
        print(f"performance metrics saved to {path}", file=sys.stderr)
    return int(any(outcome.error for outcome in outcomes))


class PromptRun:
    """One prompt's output, printed as it comes; labelled by `number` among others."""

    def __init__(self, number: int | None, config: ClientConfig) -> None:
        self._number, self._config, self._line = number, config, ""
        self._label = "" if number is None else f"[prompt {number}] "
        self._logprobs: list[tuple[int, TokenLogprobs]] = []
        self.request_id, self.text, self.error = new_id(), "", ""
        self._tokens, self.seconds = 0, 0.0
        self.ttft_seconds: float | None = None
        self.completion: GenerationEnd | None = None

    async def run(self, generate: Generate, request: GenerationRequest) -> None:
        from tandem.engine.batcher import DeviceLost
        from tandem.rpc.received_errors import TandemError
        from tandem.runners.protocol import RowFailed
        from tandem.speculation.rounds import OutOfStep

        started = time.perf_counter()
        try:
            async with contextlib.aclosing(generate(request)) as events:
                async for event in events:
                    if isinstance(event, GenerationEnd):
                        self.completion = event
                        continue
                    if self.ttft_seconds is None:
                        self.ttft_seconds = time.perf_counter() - started
                    self.text += event.text
                    self._tokens += len(event.token_ids)
                    self._logprobs += zip(event.token_ids, event.logprobs, strict=False)
                    self._show(event)
            if not self.completion:
                self.error = "the stream ended without a completion"
        except (TandemError, OutOfStep, RowFailed, DeviceLost) as error:
            self.error = str(error)
        self.seconds = time.perf_counter() - started
        self._end()

    @property
    def failure(self) -> str:
        so_far = f" after {self._tokens} token{'s' if self._tokens > 1 else ''}" if self._tokens else ""
        return f"failed{so_far}: {self.error}"

    def _show(self, chunk: Chunk) -> None:
        label = "" if self._number is None else f"[{self._number}] "
        if self._config.json:
            return
        if text := self._config.token_text:
            for token in chunk.token_ids:
                print(f"{label}token {token}: {text(token)!r}", flush=True)
        elif self._number is None:
            print(chunk.text, end="", flush=True)
        else:
            *lines, self._line = (self._line + chunk.text).split("\n")
            for line in lines:
                print(f"{label}{line}", flush=True)

    def _end(self) -> None:
        if self._config.json:
            print(json.dumps(self._as_json(), ensure_ascii=False), flush=True)
        elif self._number is None:
            print(f"\n\n{self.text}" if self._config.token_text else "", flush=True)
        elif self._line:
            print(f"[{self._number}] {self._line}", flush=True)
        for token, found in self._logprobs:
            top = "".join(f", {each} {logprob:.4f}" for each, logprob in found.top)
            line = f"{self._label}token {token}: {found.logprob:.4f}{' of' + top[1:] if top else ''}"
            print(line, file=sys.stderr)
        if self.error or not self._config.quiet:
            print(printable(f"{self._label}{self._summary()}", None), file=sys.stderr, flush=True)

    def _as_json(self) -> dict[str, object]:
        reason = self.completion and self.completion.finish_reason.name.lower()
        shown = {"text": self.text, "tokens": self._tokens, "seconds": self.seconds}
        return {"prompt": self._number or 0, **shown, "finish_reason": reason, "error": self.error or None}

    def _summary(self) -> str:
        if self.error or not self.completion:
            return f"{self.failure} (request {self.request_id})"
        done, stats = self.completion, self.completion.stats
        line = f"{done.output_tokens} tokens in {self.seconds:.2f} s, {done.output_tokens / self.seconds:.1f} tokens/s"
        if self.ttft_seconds is not None:
            line += f", first after {self.ttft_seconds * 1000:.0f} ms"
        if stats.drafted:
            line += f"; {stats.rounds} rounds, {stats.accepted} of {stats.drafted} draft tokens accepted"
            line += f" ({100 * stats.accepted / stats.drafted:.1f} %)"
        if len(stats.drafted_by) > 1:
            each = (f"{who} {stats.accepted_by.get(who, 0)} of {n}" for who, n in sorted(stats.drafted_by.items()))
            line += f": {', '.join(each)}"
        return f"{line}; ended by {done.finish_reason.name.lower().replace('_', ' ')}"


def _print_final(outcomes: list[PromptRun]) -> None:
    print("\n=== Final outputs ===")
    for i, outcome in enumerate(outcomes):
        lines = [outcome.text] if outcome.text or not outcome.error else []
        lines += [outcome.failure] if outcome.error else []
        print(f"[Prompt {i} output]:\n" + "\n".join(lines) + "\n")
