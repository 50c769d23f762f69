"""Runs one comparison: servers, clients, measurements."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from datetime import datetime, timezone
from typing import TYPE_CHECKING

from tandem.comparison.links.link import DelayLink
from tandem.comparison.measuring.architectures import AUTOREGRESSIVE, WIDTH_1
from tandem.comparison.measuring.attempt import format_error
from tandem.comparison.measuring.config import ComparisonConfig
from tandem.comparison.measuring.deployment import Describe, Endpoint, deploy, in_report_order, wants_width_1
from tandem.comparison.measuring.interruption import Interruption
from tandem.comparison.measuring.machine import this_machine
from tandem.comparison.measuring.measurement import Measuring, ServerDied, Unmeasurable, while_all_live
from tandem.comparison.measuring.progress import Progress
from tandem.comparison.measuring.record_log import RecordLog, RunData
from tandem.comparison.measuring.records import failure_of
from tandem.comparison.measuring.servers import Fleet, ServerFailed
from tandem.comparison.measuring.timed_request import Contender
from tandem.comparison.measuring.vllm import Counters
from tandem.rpc.first_contact import explained
from tandem.rpc.received_errors import TandemError
from tandem.speculation.types import ModelInfo

if TYPE_CHECKING:
    from tandem.clients.local import Tokenizer
    from tandem.clients.openai_client import OpenAIClient
    from tandem.rpc.credentials import Credentials
    from tandem.rpc.generation_client import GenerationClient

# (address, service) -> client
Connect = Callable[[str, str], "AbstractAsyncContextManager[GenerationClient | OpenAIClient]"]

OK, FAILED, USAGE, SERVER_DIED = 0, 1, 2, 4  # exit codes; 130 by Ctrl-C, 143 by SIGTERM
_SILENT = ("UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED")


class Unreachable(RuntimeError):
    """No server of the expected service answers at an address."""


def run_comparison(
    config: ComparisonConfig, connect: Connect, publish: Callable[[RunData], int], progress: Progress | None = None
) -> int:
    """Measures, publishes even an incomplete run, and returns the exit code."""
    with Interruption() as interruption:
        try:
            opened = RecordLog(started(config))
        except OSError as error:
            print(f"compare_architectures.py: error: output-dir: {error.filename}: {error.strerror}", file=sys.stderr)
            return USAGE
        with opened as log:
            code, why = _measured(log, connect, interruption, progress or Progress())
            if code and not log.measured.ended:
                log.add("end", why)
        if log.measured.records:
            published = publish(log.measured)
            code = code or published
        elif interruption.signal:
            print(f"{interruption.reason}: nothing was measured; {log.path} has the settings", file=sys.stderr)
        return interruption.exit_code if interruption.signal else code


def started(config: ComparisonConfig) -> RunData:
    """Returns an empty run of this machine."""
    return RunData(config, this_machine(), datetime.now(timezone.utc).isoformat(timespec="seconds"))


def _measured(log: RecordLog, connect: Connect, interruption: Interruption, progress: Progress) -> tuple[int, str]:
    """Returns the exit code and why the run ended early."""
    try:
        interruption.run(measure(log, connect, interruption, progress))
        return OK, ""
    except asyncio.CancelledError:
        if interruption.signal is None:
            raise
        return interruption.exit_code, interruption.reason
    except ServerDied as error:
        print(error, file=sys.stderr)
        return SERVER_DIED, f"{error}".splitlines()[0]
    except (ServerFailed, Unmeasurable, Unreachable) as error:  # before anything was measured
        print(f"compare_architectures.py: error: {error}", file=sys.stderr)
        usage = isinstance(error, Unmeasurable) or getattr(error, "returncode", None) == USAGE
        return USAGE if usage else FAILED, f"{error}".splitlines()[0]
    except Exception as error:
        if not log.measured.records:
            raise
        if log.measured.ended:  # while stopping the servers
            log.add("remark", f"After the last request: {format_error(error)}")
        return FAILED, format_error(error)


async def measure(log: RecordLog, connect: Connect, interruption: Interruption, progress: Progress) -> None:
    """Starts servers, measures, stops them. Raises ServerFailed, ServerDied, Unreachable, Unmeasurable."""
    config = log.measured.config
    tokenizer, turns = _tokenizer(config), turns_of(config)
    emulated = any(condition.link.rtt_ms is not None for condition in config.conditions)
    async with contextlib.AsyncExitStack() as whole:
        whole.enter_context(progress)
        link = await whole.enter_async_context(DelayLink()) if emulated else None
        if config.one_length:
            log.add(
                "remark",
                f"Servers of this device draft one length, {config.speculation_length} tokens a round: auto, the"
                " default of the speculation length elsewhere, has nothing to choose there.",
            )
        if config.placement:
            log.add("remark", f"Architectures were measured in turn, each with all its cores: {config.placement}.")
        while turns:
            names = turns.pop(0)
            folder = config.output_dir / "logs" / (names[0] if config.placement else "")
            fleet = Fleet(folder, config.startup_timeout, on_wait=progress.waiting, on_ready=progress.ready)
            interruption.kill = fleet.kill  # also while the fleet stops its servers
            async with contextlib.AsyncExitStack() as stack:
                await stack.enter_async_context(fleet)
                describe = _describing(connect, config.credentials)
                before = log.measured.endpoints
                endpoints = await deploy(config, fleet, describe, link, names)
                log.add("servers", in_report_order(config, [*before, *endpoints]))
                for each in endpoints if tokenizer else ():
                    if tokenizer and each.model.tokenizer_sha256 != tokenizer.sha256:  # ids would mean another text
                        name = each.architecture.name
                        raise Unmeasurable(f"mean-input-tokens: {name} has another tokenizer than --model names here")
                wide = any(each.architecture == AUTOREGRESSIVE and wants_width_1(each) for each in endpoints)
                if config.placement and wide:
                    turns.append((WIDTH_1.name,))
                contenders = [await _connected(stack, connect, each, config) for each in endpoints]
                measuring = Measuring(config, endpoints, contenders, link, progress, log, tokenizer)
                await while_all_live(measuring.run(), fleet, log)
                if config.rehearse:  # with the steps that its servers have counted by now
                    counted = [
                        replace(each, model=await describe(each.address, each.architecture.service))
                        for each in endpoints
                    ]
                    log.add("servers", in_report_order(config, [*before, *counted]))
                if not turns:
                    log.add("end", None)
                progress.say("stopping the servers")


def turns_of(config: ComparisonConfig) -> list[tuple[str, ...]]:
    """Returns which architectures run together; plain decoding last, for the margins of all others."""
    if config.placement is None:
        return [config.architectures]
    return sorted(((name,) for name in config.architectures), key=lambda turn: turn == (AUTOREGRESSIVE.name,))


def _tokenizer(config: ComparisonConfig) -> Tokenizer | None:
    if config.mean_input_tokens is None:
        return None
    from tandem.clients.local import target_tokenizer  # the models' libraries are imported only now

    try:
        return target_tokenizer(config.backend, config.model)
    except ValueError as error:
        raise Unmeasurable(f"mean-input-tokens: {error}") from error


def _describing(connect: Connect, credentials: Credentials) -> Describe:
    async def describe(address: str, service: str) -> ModelInfo:
        try:
            async with connect(address, service) as client:
                return await client.model_info(wait=False)
        except Exception as error:
            why = explained(error, address, credentials, service) if isinstance(error, TandemError) else error
            failure = failure_of(why)
            how = "does not answer" if failure.code in _SILENT else "refuses the call"
            raise Unreachable(f"{service} at {address} {how}: {failure.code}: {failure.message}") from error

    return describe


async def _connected(
    stack: contextlib.AsyncExitStack, connect: Connect, endpoint: Endpoint, config: ComparisonConfig
) -> Contender:
    service = endpoint.architecture.service
    first, *own = [await stack.enter_async_context(connect(at, service)) for at in (endpoint.reached, *endpoint.more)]
    return Contender(
        endpoint.architecture.name,
        first,
        endpoint.architecture.split,
        config.timeout,
        all_ours=not config.connect,
        own=tuple(own),
        counters=Counters(endpoint.counters) if endpoint.counters else None,
    )
