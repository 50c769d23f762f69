"""A process that compiles structures and follows outputs through them. llguidance runs here and never in the server.

structures.py starts one with the path of this file. It builds the vocabulary, and then only forks: for each structure
a process that compiles it, and from that one, for each output, a process that follows it. A fork begins with what its
parent has, at no cost, and can be killed alone. Each process has a limit of memory, and of processor time per message.

A message is a packet on the process's own socket. If the other end closes, the process is killed. If it dies, its
parent sends the signal in its place. Of Tandem it imports structure_schemas.py alone, so that it starts quickly.
"""

from __future__ import annotations

import array
import contextlib
import gc
import importlib
import json
import os
import re
import resource
import select
import signal
import socket
import struct
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

# A message begins with what to do.
FORK, TEXT, COMPILE, STEP = b"FTCS"
# The answer to it begins with one of these. DIED comes from the parent, with the signal.
DONE, REFUSED, DIED = b"+!X"
# What a STEP asks about, once the output has changed.
NOTHING, ADVANCE, MASK = range(3)

STEP_HEADER = struct.Struct("<BBxxII")  # STEP, what is asked, tokens to take back, a token
TAKEN = struct.Struct("<cI")  # DONE, how many of the tokens were taken
COMPILED = struct.Struct("<cQ")  # DONE, bytes that the process took to compile

MOST_DIGITS = 20
"""Digits in a row that a number of JSON may have: a float has 17 significant ones, an integer of 64 bits 20."""
EXPONENT_DIGITS = 3
LONGEST_NUMBER = 400
"""Digits in a row, where the schema itself has such numbers: 1e308 has 309."""
_STRINGS = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)
_NUMBER = re.compile(rb"([0-9][eE][+-]?)?([0-9]*)$")

PACKET = 64 * 1024
"""Most bytes of a text or of tokens in one packet; a socket's buffer holds about three times as many."""
_SCHEMA = re.compile(r"^(.*%json )(\{.*\})$", re.MULTILINE)
_PAGE = resource.getpagesize()


def step(asked: int, back: int, tokens: Sequence[int], token: int = 0) -> bytes:
    """Returns the packet that takes back `back` tokens and takes `tokens`, and what it asks then, about `token`."""
    return STEP_HEADER.pack(STEP, asked, back, token) + array.array("I", tokens).tobytes()


class JsonText:
    """Reads an output that is JSON. It bounds the digits of numbers, which schemas leave without end.

    `leading[n]`: the tokens that begin with n digits or more, as bits of a mask. `most`: digits in a row; an exponent
    has EXPONENT_DIGITS. `rest` (structure_schemas.Rest) checks an output that is complete; `fault`: what it found last.
    """

    def __init__(self, leading: Sequence[int], most: int, text_of: Callable[[int], bytes], rest: Any = None) -> None:
        self._leading, self._most, self._text_of, self._rest = leading, most, text_of, rest
        self._texts: list[bytes] = []
        self.fault = ""

    def take(self, token: int) -> None:
        self._texts.append(self._text_of(token))

    def back(self, count: int) -> None:
        del self._texts[len(self._texts) - count :]

    def limit(self, mask: bytearray, may_end: bool) -> None:
        """Takes the tokens out of a mask that have too many digits, unless nothing else may come."""
        outside = _STRINGS.sub(b"", b"".join(self._texts))
        number = _NUMBER.search(outside)
        assert number, "it matches what is empty"
        over = max(1, (EXPONENT_DIGITS if number[1] else self._most) - len(number[2]) + 1)
        if b'"' in outside or over >= len(self._leading):
            return
        left = int.from_bytes(mask, "little") & ~self._leading[over]
        if left or may_end:
            mask[:] = left.to_bytes(len(mask), "little")

    def complete(self) -> bool:
        """Whether an output that may end has nothing against it."""
        self.fault = self._rest.fault(b"".join(self._texts).decode(errors="replace")) if self._rest else ""
        return not self.fault


class CallText(JsonText):
    """Reads an output with calls of tools. `rest` (structure_schemas.Calls) checks each before its end mark.

    That mark may be a stop string, after which no mask is made.
    """

    def limit(self, mask: bytearray, may_end: bool) -> None:
        if fault := self._rest.fault(b"".join(self._texts).decode(errors="replace")):
            raise ValueError(f"the output breaks it at {fault}")

    def complete(self) -> bool:
        return True


def leading_digits(vocabulary: Any, vocab_size: int) -> list[int]:
    """Returns the `leading` of JsonText for a vocabulary."""
    found: list[int] = [0]
    for token in range(vocab_size):
        text = vocabulary.decode_bytes([token])
        for n in range(1, len(text) - len(text.lstrip(b"0123456789")) + 1):
            found += [0] * (n + 1 - len(found))
            found[n] |= 1 << token
    return found


def digits_needed(schema: str) -> int:
    """Returns how many digits in a row a number may have: MOST_DIGITS, or as many as the schema itself has."""
    return min(LONGEST_NUMBER, max(MOST_DIGITS, *map(len, re.findall("[0-9]+", schema)), 0))


class Follower:
    """Follows an output through a structure. Where it may end, any of `end_ids` may come next, and ends it."""

    def __init__(
        self, matcher: Any, vocab_size: int, end_ids: Sequence[int], json_text: JsonText | None = None
    ) -> None:
        self._matcher, self._vocab_size, self._end_ids, self._json = matcher, vocab_size, end_ids, json_text
        self._ended = 0  # end-of-sequence tokens taken

    def mask(self) -> bytes:
        """Returns which tokens may come next, a bit each."""
        mask = bytearray((self._vocab_size + 7) // 8)
        if not self._ended:
            made = self._matcher.compute_bitmask()[: len(mask)]
            self.check()
            mask[: len(made)] = made
        may_end = self._may_end()
        if self._json:
            self._json.limit(mask, may_end)
        for token in self._end_ids:
            mask[token // 8] &= ~(1 << token % 8)
            mask[token // 8] |= may_end << token % 8
        if self._json and self._json.fault and not any(mask):
            raise ValueError(f"the output breaks it at {self._json.fault}")
        return bytes(mask)

    def advance(self, token: int) -> bool:
        """Takes a token. Of several spellings it takes any, and the mask has only the tokenizer's own."""
        if token in self._end_ids:
            may = self._may_end()
            self._ended += may
            return may
        taken = not self._ended and bool(self._matcher.try_consume_tokens([token]))
        if taken and self._json:
            self._json.take(token)
        return taken

    def back(self, count: int) -> None:
        ends = min(self._ended, count)
        self._ended -= ends
        if count > ends:
            self._matcher.rollback(count - ends)
            if self._json:
                self._json.back(count - ends)

    def check(self) -> None:
        """Raises ValueError if the structure cannot be followed any further."""
        if self._matcher.is_error():
            raise ValueError(self._matcher.get_error())

    def _may_end(self) -> bool:
        if self._ended or not self._matcher.is_accepting():
            return self._ended > 0
        return self._json is None or self._json.complete()


class Bytes:
    """A tokenizer as llguidance takes it, for a list of tokens that are single bytes."""

    bos_token_id = None

    def __init__(self, tokens: Sequence[bytes], end: int) -> None:
        self.tokens, self.eos_token_id = tokens, end
        self.special_token_ids = [token for token, spelled in enumerate(tokens) if not spelled]
        self._ids = {spelled: token for token, spelled in enumerate(tokens) if spelled}

    def __call__(self, text: str | bytes) -> list[int]:
        raw = text.encode() if isinstance(text, str) else text
        return [self._ids[bytes([byte])] for byte in raw]


def vocabulary_of(spelling: str | Sequence[bytes], vocab_size: int, end: int) -> Any:
    import llguidance

    if isinstance(spelling, str):
        return llguidance.LLTokenizer(spelling, n_vocab=vocab_size, eos_token=end)
    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(Bytes(spelling, end)), eos_token=end)


def grammar(kind: str, text: str) -> str:
    """Returns llguidance's form of a structure of this kind. Raises ValueError."""
    from llguidance import LLMatcher

    from tandem.engine.structure_schemas import CALLS, rewritten

    def enforced(found: re.Match[str]) -> str:
        schema, dropped = rewritten(found[2], compiles)
        if dropped and not text.startswith(CALLS):
            raise ValueError(f"at {dropped} of %json: a grammar cannot say it; a json_schema is checked for it")
        return found[1] + schema

    if kind == "json_schema":
        return json_grammar(rewritten(text, compiles)[0])
    if kind == "grammar":
        text = _SCHEMA.sub(enforced, text)
    if kind == "choice":
        text = "start: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in json.loads(text))
    return str(LLMatcher.grammar_from_regex(text) if kind == "regex" else LLMatcher.grammar_from_lark(text))


def json_grammar(schema: str) -> str:
    """Returns llguidance's form of a JSON schema, without optional whitespace, which some models would write for ever.

    It leaves out keywords that it does not have, and takes formats that it does not have as annotations.
    """
    from llguidance import LLMatcher

    return str(LLMatcher.grammar_from_json_schema(schema, defaults={"whitespace_flexible": False, "lenient": True}))


def compiles(pattern: str) -> bool:
    """Whether llguidance has a regular expression, in a schema."""
    return not fault(json.dumps({"type": "string", "pattern": pattern}))


def fault(schema: str) -> str:
    """Returns why llguidance does not compile a JSON schema; "" if it does."""
    from llguidance import LLMatcher

    return str(LLMatcher.validate_grammar(json_grammar(schema)))


class Worker:
    """Serves one structure process. `given`: what the server sent at its start, such as the limits."""

    def __init__(self, own: socket.socket, given: dict[str, Any]) -> None:
        self._own, self._given = own, given
        spelling = given["spelling"]
        spelled = spelling if isinstance(spelling, str) else [bytes.fromhex(token) for token in spelling]
        self._vocabulary = vocabulary_of(spelled, given["vocab_size"], given["end_ids"][0])
        self._leading = leading_digits(self._vocabulary, given["vocab_size"])
        self._follower: Follower | None = None
        self._text = b""
        self._packet = bytearray(PACKET + STEP_HEADER.size)
        self._begin()

    def _text_of(self, token: int) -> bytes:
        return bytes(self._vocabulary.decode_bytes([token]))

    def serve(self) -> NoReturn:
        while True:
            size, fd = self._received()
            if self._packet[0] == FORK:
                self._fork(fd)
            elif self._packet[0] == TEXT:
                self._text += self._packet[1:size]
            else:
                self._answer(memoryview(self._packet)[:size])

    def _answer(self, packet: memoryview) -> None:
        compiles = packet[0] == COMPILE
        signal.setitimer(signal.ITIMER_PROF, self._given["compile_seconds" if compiles else "step_seconds"])
        try:
            answer = self._compile(str(packet[1:], "ascii")) if compiles else self._step(packet)
        except MemoryError:
            os.abort()  # as in Rust
        except BaseException as error:  # also panics of Rust
            answer = bytes([REFUSED]) + str(error).encode(errors="replace")[:PACKET]
        signal.setitimer(signal.ITIMER_PROF, 0)
        self._own.send(answer)

    def _compile(self, kind: str) -> bytes:
        """Compiles the text, and makes the first mask: a structure may be found to be wrong only there."""
        import llguidance

        from tandem.engine import structure_schemas

        before, most = _address_space(), self._given["memory_bytes"]
        resource.setrlimit(resource.RLIMIT_AS, (before + most, before + most))
        limits = llguidance.LLParserLimits(max_lexer_states=self._given["lexer_states"], verbose_errors=False)
        text = self._text.decode("utf-8", "surrogatepass")
        schema = text.removeprefix(structure_schemas.CALLS) if kind == "grammar" else text
        calls, made = schema != text, ""
        read: JsonText | None = None
        if calls or kind == "json_schema":
            made, dropped = structure_schemas.rewritten(schema, compiles)
            if calls and dropped:
                read = CallText([], 0, self._text_of, structure_schemas.Calls(schema))
            elif not calls:
                rest = structure_schemas.Rest(text) if dropped else None
                read = JsonText(self._leading, digits_needed(text), self._text_of, rest)
        form = grammar(kind, text) if calls or not made else json_grammar(made)
        matcher = llguidance.LLMatcher(self._vocabulary, form, log_level=0, limits=limits)
        if made and matcher.is_error():
            why = (calls and fault(made)) or matcher.get_error()
            raise ValueError(structure_schemas.blamed(made, why, fault))
        self._follower = Follower(matcher, self._given["vocab_size"], self._given["end_ids"], read)
        self._follower.check()
        if not any(self._follower.mask()):
            raise ValueError("no output can match it")
        return COMPILED.pack(bytes([DONE]), max(0, _address_space() - before))

    def _step(self, packet: memoryview) -> bytes:
        """Takes back tokens, takes others, and answers a question about what may follow if all were taken."""
        follower = self._follower
        assert follower is not None, "it is compiled first"
        _, asked, back, token = STEP_HEADER.unpack_from(packet)
        tokens = array.array("I", packet[STEP_HEADER.size :].tobytes())
        if back:
            follower.back(back)
        taken = next((i for i, each in enumerate(tokens) if not follower.advance(each)), len(tokens))
        answer = b""
        if taken == len(tokens):
            if asked == MASK:
                answer = follower.mask()
            elif asked == ADVANCE:
                answer = bytes([follower.advance(token)])
        follower.check()
        return TAKEN.pack(bytes([DONE]), taken) + answer

    def _fork(self, fd: int | None) -> None:
        """Forks; the child answers on `fd`. Where that fails, the other end is told by its closing."""
        if fd is None:
            return
        given = socket.socket(fileno=fd)
        try:
            pid = os.fork()
        except OSError:
            return given.close()
        if pid:
            self._children[fd] = pid, given
            self._poll.register(fd, 0)  # tells only that the other end is closed
            return
        for other in (self._own, *(other for _, other in self._children.values())):
            other.close()
        os.close(self._woken)
        self._own = given
        self._begin()
        if self._follower:
            self._step(memoryview(step(MASK, 0, ())))  # touches what the first question will, while nobody waits

    def _begin(self) -> None:
        """Begins to watch its own socket and children, of which there are none yet."""
        self._children: dict[int, tuple[int, socket.socket]] = {}
        self._woken, write = os.pipe()
        for end in (self._woken, write):
            os.set_blocking(end, False)
        before = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        if before >= 0:
            os.close(before)
        self._poll = select.poll()
        self._poll.register(self._own, select.POLLIN)
        self._poll.register(self._woken, select.POLLIN)

    def _received(self) -> tuple[int, int | None]:
        """Returns the size of the next packet and the descriptor in it. If none will come, ends with its children."""
        while self._children and not self._watched():
            pass
        room = socket.CMSG_SPACE(array.array("i").itemsize)
        size, ancillary, _, _ = self._own.recvmsg_into([self._packet], room)
        if not size:
            for pid, _ in self._children.values():
                os.kill(pid, signal.SIGKILL)
            os._exit(0)
        fds = array.array("i", b"".join(data for _, _, data in ancillary))
        return size, fds[0] if fds else None

    def _watched(self) -> bool:
        """Waits for something; kills the children that nobody waits for. Returns whether a packet has come."""
        found = dict(self._poll.poll())
        if self._woken in found:
            self._reap()
        for fd in found.keys() & self._children.keys():
            os.kill(self._children[fd][0], signal.SIGKILL)
            self._poll.unregister(fd)
        return self._own.fileno() in found

    def _reap(self) -> None:
        """Reaps dead children; sends the signals that killed them to those who wait for their answers.

        A child is reaped last: once it is gone, nothing can be sent to it any more, so nobody forks what never answers.
        """
        with contextlib.suppress(BlockingIOError):
            os.read(self._woken, PACKET)
        for fd, (pid, other) in list(self._children.items()):
            ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended:
                with contextlib.suppress(OSError):
                    if ended.si_code in (os.CLD_KILLED, os.CLD_DUMPED):
                        other.send(bytes([DIED, ended.si_status]), socket.MSG_DONTWAIT)
                del self._children[fd]
                with contextlib.suppress(KeyError):
                    self._poll.unregister(fd)
                other.close()
                os.waitpid(pid, 0)


def _address_space() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[0]) * _PAGE


def main() -> None:
    own = socket.socket(fileno=int(sys.argv[1]))
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # it ends with the server, which may have requests to finish
    signal.signal(signal.SIGCHLD, lambda *_: None)  # so that it wakes
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    importlib.import_module("tandem.engine.structure_schemas")  # so that forks have it
    try:
        worker = Worker(own, json.load(sys.stdin))
    except BaseException as error:
        own.send(bytes([REFUSED]) + f"{type(error).__name__}: {error}".encode(errors="replace")[:PACKET])
        return
    sys.stdin.close()
    os.dup2(os.open(os.devnull, os.O_RDWR), 2)  # Rust's last words may quote the structure
    gc.freeze()  # forks share what is never collected
    own.send(bytes([DONE]))
    worker.serve()


if __name__ == "__main__":
    sys.path[0] = os.path.abspath(f"{os.path.dirname(__file__)}/../..")  # where Tandem is, not its modules
    main()
