"""The server's side of processes that compile and follow structures (structure_worker.py)."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tandem.engine import structure_worker
from tandem.engine.structure_worker import ADVANCE, COMPILE, COMPILED, DONE, FORK, MASK, NOTHING, PACKET, TAKEN, TEXT
from tandem.speculation.draws import StructureFailed
from tandem.speculation.processing import Mask
from tandem.speculation.sampling import InvalidField, Structure

COMPILE_SECONDS = 2.0  # processor time to compile a structure and make its first mask
STEP_SECONDS = 0.25  # processor time to follow a token, or make a mask
MEMORY_MIB = 256  # of a process that compiles a structure or follows an output
LEXER_STATES = 50_000  # llguidance's own limit, at 1 to 2 kB each
STALLED_SECONDS = 10.0  # wall-clock limit of an answer, far above its processor time
HUNG_SECONDS = 120.0  # the same for starting and compiling, for which no step waits
_END_SECONDS = 1.0
TRIES = 2  # at work whose process ends early
_TOKENS = PACKET // 4  # in one packet


class StructureRefused(ValueError):
    """The structure cannot be compiled or followed."""


class Died(RuntimeError):
    """The process has ended. `late`: it had all its time; else it lacked memory, or was killed."""

    def __init__(self, late: bool = False) -> None:
        super().__init__("ended")
        self.late = late


def refusal(structure: Structure, error: StructureRefused | Died, doing: str) -> InvalidField:
    """The request's error. `doing`: "compile" or "follow"."""
    match error:
        case Died(late=True) if doing == "compile":
            why = f"it took more than {COMPILE_SECONDS:g} s of processor time to compile"
        case Died(late=True):
            why = f"it took more than {STEP_SECONDS:g} s of processor time to follow one token"
        case Died():
            why = f"it needed more than {MEMORY_MIB} MiB of memory to {doing}, or is nested too deeply"
        case StructureRefused() if str(error).startswith("NoExtension"):
            why = "no output can match it" if doing == "compile" else "no token can follow the output"
        case StructureRefused():
            why = " ".join(str(error).split())[:200]
    return InvalidField("structure", f"the {structure.kind.value} cannot be enforced: {why}")


class StructureProcess:
    """A process that ends with this object; one thread at a time may query it, any may `fork`."""

    def __init__(self, own: socket.socket, process: subprocess.Popen[bytes] | None = None) -> None:
        self._own = own
        self._answer = bytearray(PACKET + TAKEN.size)
        self._expected = 0  # tokens that are to be taken
        self._late_at = 0.0  # when a process that answers has used up its time
        self.close = weakref.finalize(self, _ended, own, process)

    @classmethod
    def started(cls, given: Mapping[str, Any]) -> StructureProcess:
        """Starts a process to fork from; blocks until it is ready. Raises OSError, StructureRefused or Died."""
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
        started = cls(ours, process)
        started._wait(HUNG_SECONDS, HUNG_SECONDS)
        started.answer()
        return started

    def fork(self) -> StructureProcess:
        """A copy of this process. Raises Died."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                socket.send_fds(self._own, [bytes([FORK])], [theirs.fileno()])
            except OSError:
                ours.close()
                raise Died from None
        return StructureProcess(ours)

    def compile(self, kind: str, text: str) -> int:
        """Compiles a structure; returns the bytes used. Blocks. Raises StructureRefused and Died."""
        self._wait(HUNG_SECONDS, COMPILE_SECONDS)
        raw = text.encode("utf-8", "surrogatepass")
        with contextlib.suppress(OSError):  # `answer` raises the reason
            for at in range(0, len(raw), PACKET):
                self._own.send(bytes([TEXT]) + raw[at : at + PACKET])
            self._own.send(bytes([COMPILE]) + kind.encode())
        return int(COMPILED.unpack(self._read())[1])

    def take(self, tokens: Sequence[int]) -> int:
        """Takes tokens while they match; returns how many did. Blocks. Raises StructureRefused and Died."""
        taken = 0
        for at in range(0, len(tokens), _TOKENS):
            part = tokens[at : at + _TOKENS]
            self.ask(NOTHING, 0, part)
            taken += TAKEN.unpack_from(self._read())[1]
            if taken < at + len(part):
                break
        return taken

    def ask(self, question: int, back: int, tokens: Sequence[int], token: int = 0) -> None:
        """Takes tokens back and others, and asks, before `answer`; may block. Raises StructureRefused and Died."""
        last = max(0, len(tokens) - 1) // _TOKENS * _TOKENS
        for at in range(0, last, _TOKENS):
            self.ask(NOTHING, back, tokens[at : at + _TOKENS])
            self.answer()
            back = 0
        self._wait(STALLED_SECONDS, STEP_SECONDS)
        with contextlib.suppress(OSError):  # `answer` raises the reason
            self._own.send(structure_worker.step(question, back, tokens[last:], token))
        self._expected = len(tokens) - last

    def answer(self) -> memoryview:
        """The last answer, valid until the next one; blocks. Raises StructureRefused and Died."""
        answer = self._read()
        if self._expected and TAKEN.unpack_from(answer)[1] < self._expected:
            raise StructureRefused("the output does not match it")
        return answer[TAKEN.size :]

    def stop(self) -> None:
        """Ends it from any thread, also while another waits for an answer."""
        with contextlib.suppress(OSError):
            self._own.shutdown(socket.SHUT_RDWR)

    def _wait(self, seconds: float, processor_seconds: float) -> None:
        with contextlib.suppress(OSError):  # it is closed
            self._own.settimeout(seconds)
        self._late_at = time.perf_counter() + processor_seconds

    def _read(self) -> memoryview:
        with contextlib.suppress(OSError):
            answer = memoryview(self._answer)[: self._own.recv_into(self._answer)]
            if answer and answer[0] != DONE:
                raise StructureRefused(str(answer[1:], errors="replace"))
            if answer:
                return answer
        raise Died(late=time.perf_counter() >= self._late_at)


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

    def take(self, tokens: Sequence[int]) -> int:
        """See StructureProcess.take."""
        taken = self._process.take(tokens)
        self._tokens, self._sent, self._shared = list(tokens[:taken]), list(tokens[:taken]), taken
        return taken

    def stop(self) -> None:
        self._process.stop()

    def mask(self) -> Mask:
        if self._mask is None:
            packed = np.frombuffer(self._bits(), dtype=np.uint8)
            self._mask = np.unpackbits(packed, count=self._vocab_size, bitorder="little").view(np.bool_)
        return self._mask

    def allows(self, token: int) -> bool:
        if not _has(self._bits(), token):
            return False
        if self._looks_ahead and not self._due and self._shared == len(self._sent) == len(self._tokens):
            with contextlib.suppress(StructureRefused, Died):
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
        """Brings the process to the output's end and queries it. Raises StructureFailed."""
        for attempt in range(TRIES):
            if self._failed:
                break
            ahead = self._due and question == MASK and self._shared == len(self._sent) == len(self._tokens)
            try:
                if not ahead:
                    self._drop_answer()
                    self._process.ask(question, len(self._sent) - self._shared, self._tokens[self._shared :], token)
                    self._sent[self._shared :] = self._tokens[self._shared :]
                    self._shared = len(self._sent)
                self._due = False
                return self._process.answer()
            except (StructureRefused, Died) as error:
                # a look-ahead's time is not known, since nobody waited for it
                if isinstance(error, StructureRefused) or attempt or (error.late and not ahead):
                    self._failed = refusal(self._structure, error, "follow").fault
                else:
                    self._again()
        raise StructureFailed(self._failed)

    def _drop_answer(self) -> None:
        # reads an unwanted answer; a failed process is replaced
        if self._due:
            self._due = False
            try:
                self._process.answer()
            except (StructureRefused, Died):
                self._looks_ahead = False  # a costly mask is made only where it is needed
                self._again()

    def _again(self) -> None:
        self._process.close()
        self._sent, self._shared, self._due = [], 0, False
        with contextlib.suppress(Died):
            self._process = self._compiled.fork()


def _has(bits: bytes, token: int) -> bool:
    return token < 8 * len(bits) and bool(bits[token // 8] >> token % 8 & 1)
