"""The server's side of processes that compile and follow structures (structure_worker.py)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import subprocess
import sys
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tandem.engine import structure_worker
from tandem.engine.structure_worker import (
    ADVANCE,
    COMPILE,
    COMPILED,
    DIED,
    DONE,
    FORK,
    MASK,
    NOTHING,
    PACKET,
    TAKEN,
    TEXT,
)
from tandem.speculation.draws import BadLogits, StructureFailed
from tandem.speculation.processing import Mask
from tandem.speculation.sampling import InvalidField, Structure

COMPILE_SECONDS = 2.0  # processor time to compile a structure and make its first mask
STEP_SECONDS = 0.25  # processor time to follow a token, or make a mask
MEMORY_MIB = 256  # of a process that compiles a structure or follows an output
LEXER_STATES = 50_000  # llguidance's own limit, at 1 to 2 kB each
STALLED_SECONDS = 10.0  # wall-clock limit of an answer, far above its processor time
HUNG_SECONDS = 120.0  # the same for starting and compiling, for which no step waits
_END_SECONDS = 1.0
TRIES = 2  # at work whose process ends within its limits
_TOKENS = PACKET // 4  # in one packet


class Refused(ValueError):
    """The structure cannot be compiled or followed."""


class Died(RuntimeError):
    """The process has ended, by `signal`; None: unknown."""

    def __init__(self, number: int | None = None) -> None:
        super().__init__(f"ended by signal {number}" if number else "ended")
        self.signal = number


LIMITS: dict[int | None, str] = {
    signal.SIGPROF: "time",
    signal.SIGABRT: "memory",
    signal.SIGSEGV: "nesting",
    signal.SIGBUS: "nesting",
}  # exceeded limits by the signal that ended a process


def refusal(structure: Structure, error: Refused | Died, doing: str) -> InvalidField:
    """The request's error. `doing`: "compile" or "follow"."""
    match error:
        case Died(signal=signal.SIGPROF) if doing == "compile":
            why = f"it took more than {COMPILE_SECONDS:g} s of processor time to compile"
        case Died(signal=signal.SIGPROF):
            why = f"it took more than {STEP_SECONDS:g} s of processor time to follow one token"
        case Died(signal=signal.SIGABRT):
            why = f"it needed more than {MEMORY_MIB} MiB of memory to {doing}"
        case Died(signal=signal.SIGSEGV | signal.SIGBUS):
            why = "it is nested too deeply"
        case Died():
            why = f"the processes that were to {doing} it were killed"
        case Refused() if str(error).startswith("NoExtension"):
            why = "no output can match it" if doing == "compile" else "no token can follow the output"
        case Refused():
            why = " ".join(str(error).split())[:200]
    return InvalidField("structure", f"the {structure.kind.value} cannot be enforced: {why}")


class StructureProcess:
    """A process that ends with this object; one thread at a time may query it, any may `fork`."""

    def __init__(
        self,
        own: socket.socket,
        parent: StructureProcess | None = None,
        process: subprocess.Popen[bytes] | None = None,
    ) -> None:
        self._own, self._parent = own, parent  # the parent lives as long, to send how this one ended
        self._answer = bytearray(PACKET + TAKEN.size)
        self._expected = 0  # tokens that are to be taken
        self.close = weakref.finalize(self, _ended, own, process)

    @classmethod
    def started(cls, given: Mapping[str, Any]) -> StructureProcess:
        """Starts a process to fork from once `ready`; blocks milliseconds. Raises OSError."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, structure_worker.__file__, str(theirs.fileno())]
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, pass_fds=[theirs.fileno()]
            )
        limits = {
            "compile_seconds": COMPILE_SECONDS,
            "step_seconds": STEP_SECONDS,
            "memory_bytes": MEMORY_MIB * 2**20,
            "lexer_states": LEXER_STATES,
        }
        assert process.stdin is not None
        with process.stdin as pipe:
            pipe.write(json.dumps({**given, **limits}).encode())
        return cls(ours, process=process)

    async def ready(self) -> None:
        """Waits until a `started` process can fork. Raises Refused or Died."""
        await self._answered()

    def fork(self) -> StructureProcess:
        """A copy of this process, which may still be starting. Raises Died."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                socket.send_fds(self._own, [bytes([FORK])], [theirs.fileno()])
            except OSError:
                ours.close()
                raise Died from None
        return StructureProcess(ours, self)

    async def compile(self, kind: str, text: str) -> int:
        """Compiles a structure; returns the bytes used. Raises Refused and Died."""
        raw = text.encode("utf-8", "surrogatepass")
        for at in range(0, len(raw), PACKET):
            await self._sent(bytes([TEXT]) + raw[at : at + PACKET])
        await self._sent(bytes([COMPILE]) + kind.encode())
        return int(COMPILED.unpack(await self._answered())[1])

    async def take(self, tokens: Sequence[int]) -> int:
        """Takes tokens while they match; returns how many did. Raises Refused and Died."""
        taken = 0
        for at in range(0, len(tokens), _TOKENS):
            part = tokens[at : at + _TOKENS]
            await self._sent(structure_worker.step(NOTHING, 0, part))
            taken += TAKEN.unpack_from(await self._answered())[1]
            if taken < at + len(part):
                break
        return taken

    def ask(self, question: int, back: int, tokens: Sequence[int], token: int = 0) -> None:
        """Takes tokens back and others, and requests a mask, before `answer`; may block. Raises Refused and Died."""
        last = max(0, len(tokens) - 1) // _TOKENS * _TOKENS
        for at in range(0, last, _TOKENS):
            self.ask(NOTHING, back, tokens[at : at + _TOKENS])
            self.answer()
            back = 0
        if not self._own.gettimeout():
            self._own.settimeout(STALLED_SECONDS)
        with contextlib.suppress(OSError):  # `answer` raises the reason
            self._own.send(structure_worker.step(question, back, tokens[last:], token))
        self._expected = len(tokens) - last

    def answer(self) -> memoryview:
        """The last answer, valid until the next one; blocks. Raises Refused and Died."""
        try:
            answer = self._read(self._own.recv_into(self._answer))
        except OSError:
            raise Died from None
        if TAKEN.unpack_from(answer)[1] < self._expected:
            raise Refused("the output does not match it")
        return answer[TAKEN.size :]

    async def _sent(self, packet: bytes) -> None:
        self._own.setblocking(False)
        with contextlib.suppress(OSError):  # `_answered` raises the reason
            await asyncio.get_running_loop().sock_sendall(self._own, packet)

    async def _answered(self) -> memoryview:
        self._own.setblocking(False)
        loop = asyncio.get_running_loop()
        hangs = loop.call_later(HUNG_SECONDS, self._own.shutdown, socket.SHUT_RDWR)
        try:
            return self._read(await loop.sock_recv_into(self._own, self._answer))
        except OSError:
            raise Died from None
        finally:
            hangs.cancel()

    def _read(self, size: int) -> memoryview:
        answer = memoryview(self._answer)[:size]
        if not size:
            raise Died
        if answer[0] == DIED:
            raise Died(answer[1])
        if answer[0] != DONE:
            raise Refused(str(answer[1:], errors="replace"))
        return answer


def _ended(own: socket.socket, process: subprocess.Popen[bytes] | None) -> None:
    own.close()  # which ends it
    if process is None:
        return
    try:
        process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


class RemoteMatcher:
    """A Matcher in a process forked from `compiled`, and again if it is killed; for one thread at a time."""

    def __init__(self, structure: Structure, compiled: StructureProcess, vocab_size: int) -> None:
        self._structure, self._compiled, self._vocab_size = structure, compiled, vocab_size
        self._process = compiled.fork()
        self._tokens: list[int] = []
        self._sent: list[int] = []  # that the process has taken
        self._shared = 0  # length of their common beginning with the output
        self._due = False  # whether an answer is due: the mask after all tokens that were sent
        self._looks_ahead = True
        self._packed = b""  # the mask, a bit for each token, if it is known
        self._mask: Mask | None = None
        self._failed = ""

    async def take(self, tokens: Sequence[int]) -> int:
        """See StructureProcess.take."""
        taken = await self._process.take(tokens) if tokens else 0
        self._tokens, self._sent, self._shared = list(tokens[:taken]), list(tokens[:taken]), taken
        return taken

    def mask(self) -> Mask:
        if self._mask is None:
            packed = np.frombuffer(self._bits(), dtype=np.uint8)
            self._mask = np.unpackbits(packed, count=self._vocab_size, bitorder="little").view(np.bool_)
        return self._mask

    def allows(self, token: int) -> bool:
        if not _has(self._bits(), token):
            return False
        if self._looks_ahead and not self._due and self._shared == len(self._sent) == len(self._tokens):
            with contextlib.suppress(Refused, Died):
                self._process.ask(MASK, 0, (token,))
            self._sent.append(token)
            self._due = True
        return True

    def advance(self, token: int) -> bool:
        sure = _has(self._packed, token)
        if not sure and not self._ask(ADVANCE, token)[0]:
            return False
        at = len(self._tokens)
        self._tokens.append(token)
        if not sure:
            self._sent.append(token)
        if self._shared == at and self._sent[at:] == [token]:
            self._shared += 1
        self._packed, self._mask = b"", None
        return True

    def back(self, count: int) -> None:
        if count:
            del self._tokens[-count:]
            self._shared = min(self._shared, len(self._tokens))
            self._packed, self._mask = b"", None

    def _bits(self) -> bytes:
        if not self._packed:
            self._packed = bytes(self._ask(MASK))
        return self._packed

    def _ask(self, question: int, token: int = 0) -> memoryview:
        """Brings the process to the output's end and queries it. Raises StructureFailed, or another BadLogits."""
        for _ in range(TRIES):
            if self._failed:
                break
            wanted = question == MASK and self._shared == len(self._sent) == len(self._tokens)
            try:
                if not (self._due and wanted):
                    self._drop_answer()
                    self._process.ask(question, len(self._sent) - self._shared, self._tokens[self._shared :], token)
                    self._sent[self._shared :] = self._tokens[self._shared :]
                    self._shared = len(self._sent)
                self._due = False
                return self._process.answer()
            except (Refused, Died) as error:
                if isinstance(error, Refused) or error.signal in LIMITS:
                    self._failed = refusal(self._structure, error, "follow").fault
                else:
                    self._again()
        if self._failed:
            raise StructureFailed(self._failed)
        raise BadLogits("the processes that follow the structure were killed")

    def _drop_answer(self) -> None:
        # reads an unwanted answer; a failed process is replaced
        if self._due:
            self._due = False
            try:
                self._process.answer()
            except (Refused, Died):
                self._looks_ahead = False  # a costly mask is made only where it is needed
                self._again()

    def _again(self) -> None:
        self._process.close()
        self._sent, self._shared, self._due = [], 0, False
        with contextlib.suppress(Died):
            self._process = self._compiled.fork()


def _has(bits: bytes, token: int) -> bool:
    return token < 8 * len(bits) and bool(bits[token // 8] >> token % 8 & 1)
