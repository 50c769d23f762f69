"""Starts the peers of benchmarks/fast.py: vLLM and OpenVINO once, llama.cpp for each part."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import llama_files, llama_peer, openvino_peer, vllm_peer
from benchmarks.fast_report import Outcome
from benchmarks.fast_settings import Settings
from benchmarks.formats import MIXED, OPENVINO, STORED
from benchmarks.llama_peer import LlamaServer, Served
from benchmarks.peers import PeerFailed
from benchmarks.process_groups import ProcessGroups
from tandem.comparison.measuring.servers import ServerFailed

Say = Callable[[str], None]
DRAFT_TYPE = "F16"  # as in the draft's checkpoint


async def start_vllm(
    settings: Settings, logs: Path, stack: contextlib.AsyncExitStack, outcome: Outcome, say: Say
) -> list[vllm_peer.Peer]:
    """Starts vLLM plain, with n-grams and with our draft; reports and skips failures."""
    from tandem.checkpoints.gguf_cache import unpacked
    from tandem.checkpoints.locate import embedded_draft, find

    python = settings.vllm_python
    if why := vllm_peer.absence(python):
        outcome.remarks.append(why)
        return []
    assert python is not None
    model, peers = unpacked(find(None)).folder, []
    methods = vllm_peer.speculations(settings.vllm_methods, settings.draft_tokens, embedded_draft())
    for name, speculation in methods.items():
        command, log = [python, str(vllm_peer.WORKER)], logs / f"{name}.log"
        peer = vllm_peer.Peer(name, command, vllm_peer.environment(python, settings.threads), log)
        stack.push_async_callback(peer.stop)
        asked = vllm_peer.settings(model, settings.sequence_length, max(settings.levels), speculation)
        if await _started(peer, asked, outcome, say):
            peers.append(peer)
    return peers


async def _started(peer: vllm_peer.Peer, asked: dict[str, Any], outcome: Outcome, say: Say) -> bool:
    """Starts a worker; notes its description in `outcome`, or the failure."""
    try:
        outcome.peers[peer.name] = info = await peer.start(asked)
    except PeerFailed as error:
        outcome.remarks.append(str(error))
        return False
    say(f"{peer.name} is ready after {info.startup_seconds:.0f} s: {info}")
    return True


@dataclass
class TargetFiles:
    """GGUF files of the embedded target in other formats, each written on first use."""

    folder: Path
    quantize: Path | None = None  # llama.cpp's program, beside its server
    threads: int = 1

    @functools.cached_property
    def source(self) -> Any:
        return llama_files.read(self.path(STORED))

    def path(self, file_type: str) -> Path:
        from tandem.checkpoints.locate import find

        if file_type == STORED:
            stored = find(None).gguf_file
            assert stored is not None, "the embedded model is a GGUF file"
            return stored
        file = self.folder / f"{file_type}.gguf"
        if not file.exists() and file_type == MIXED:
            if self.quantize is None:
                raise PeerFailed(f"no {MIXED}: llama-quantize, beside llama.cpp's server, writes it")
            llama_files.write_mixed(self.quantize, self.path("BF16"), file_type, file, self.threads)
        elif not file.exists():
            llama_files.write_target(self.source, file_type, file)
        return file


@dataclass(frozen=True)
class Llama:
    """Starts the servers of llama.cpp's builds, plain and with our draft, in each format."""

    served: tuple[Served, ...]
    threads: int
    sequence_length: int
    logs: Path
    groups: ProcessGroups

    async def start(
        self, slots: int, stack: contextlib.AsyncExitStack, outcome: Outcome, say: Say
    ) -> list[LlamaServer]:
        """Starts the servers with this many slots; reports and skips failures."""
        servers: list[LlamaServer] = []
        for served in self.served:
            log = self.logs / f"{served.name}, {slots}.log"
            running = llama_peer.running(self.groups, served, self.threads, slots, self.sequence_length, log)
            try:
                server, outcome.peers[served.name] = await stack.enter_async_context(running)
            except (PeerFailed, ServerFailed) as error:
                outcome.remarks += {str(error)} - {*outcome.remarks}  # it may have failed before, with other slots
                continue
            say(f"{served.name} is ready: {outcome.peers[served.name]}")
            servers.append(server)
        return servers


def prepare_llama(settings: Settings, files: TargetFiles, outcome: Outcome, say: Say) -> Llama | None:
    """Writes the files that llama.cpp's builds run; without a server of any, reports that and returns None."""
    from tandem.checkpoints.locate import embedded_draft

    why = {build: llama_peer.absence(build, program) for build, program in settings.llama_servers.items()}
    outcome.remarks += filter(None, why.values())
    outcome.builds = tuple(build for build in why if not why[build]) or outcome.builds
    programs = {build: program for build, program in settings.llama_servers.items() if not why[build]}
    if not programs:
        return None
    beside = [Path(program).with_name("llama-quantize") for program in programs.values()]
    files.quantize = next((program for program in beside if program.exists()), None)
    draft: Path | None = None
    if folder := embedded_draft():
        draft = files.folder / "draft.gguf"
        llama_files.write_draft(Path(folder), files.source, DRAFT_TYPE, draft)
    served: list[Served] = []
    for form in settings.formats:
        for i, file_type in enumerate(form.file_types):
            try:
                file = files.path(file_type)
            except PeerFailed as error:
                outcome.remarks.append(str(error))
                continue
            for build, program in programs.items():
                served.append(Served(form.of(build)[i], program, file_type, file))
                if draft:
                    with_draft = form.of(build, draft=True)[i]
                    served.append(Served(with_draft, program, file_type, file, draft, settings.draft_tokens))
    say("wrote the files that llama.cpp runs")
    return Llama(tuple(served), settings.threads, settings.sequence_length, files.folder, ProcessGroups())


async def start_openvino(
    settings: Settings, files: TargetFiles, stack: contextlib.AsyncExitStack, outcome: Outcome, say: Say
) -> list[vllm_peer.Peer]:
    """Starts OpenVINO plain in every format; reports and skips failures."""
    python, peers = settings.openvino_python, []
    if why := openvino_peer.absence(python):
        outcome.remarks.append(why)
        return []
    assert python is not None
    for form in settings.formats:
        (name, *_), (first, *_) = form.of(OPENVINO), form.file_types
        file_type = openvino_peer.FILE_TYPES.get(first, first)
        command, log = [python, str(openvino_peer.WORKER)], files.folder / f"{name}.log"
        peer = vllm_peer.Peer(name, command, os.environ, log)
        stack.push_async_callback(peer.stop)
        model = files.path(file_type)
        asked = openvino_peer.settings(model, file_type, settings.threads, max(settings.levels))
        if await _started(peer, asked, outcome, say):
            peers.append(peer)
    return peers


def what_llama_said(servers: list[LlamaServer]) -> list[str]:
    """Returns the servers' own time per token and accepted drafts."""
    found: list[str] = []
    for server in servers:
        tokens = sum(len(each.answered.token_ids) - 1 for each in server.said)
        if tokens < 1:
            continue
        own = sum(each.predicted_ms for each in server.said) / tokens
        drafted = sum(each.drafted for each in server.said)
        accepted = sum(each.accepted for each in server.said)
        drafts = f", {accepted} of {drafted} draft tokens accepted" if drafted else ""
        found.append(f"{server.name} says of its answers, alone: {own:.2f} ms per token after the first{drafts}")
    return found
