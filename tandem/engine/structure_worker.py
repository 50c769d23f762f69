"""A process that compiles structures and follows outputs with llguidance, apart from the server.

The first process builds the vocabulary and forks one process per structure, which forks one per output: each has its
limits, and ends alone. Messages are packets on its socket; a process ends when that is closed, even while it compiles.
Imports only structure_schemas.py of Tandem, to start quickly.
"""

from __future__ import annotations

import array
import fcntl
import gc
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
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:  # main makes it importable
    from tandem.engine.structure_schemas import Rest

# A message begins with what to do.
FORK, TEXT, COMPILE, STEP = b"FTCS"
# The answer to it begins with one of these.
DONE, REFUSED = b"+!"
# What a STEP asks about, once the output has changed.
NOTHING, ADVANCE, MASK = range(3)

STEP_HEADER = struct.Struct("<BBxxII")  # STEP, the question, tokens to take back, a token
TAKEN = struct.Struct("<cI")  # DONE, how many of the tokens were taken
COMPILED = struct.Struct("<cQ")  # DONE, bytes that the process took to compile

PACKET = 64 * 1024  # bytes of a text or of tokens per packet; a socket buffers about three times as many
MOST_DIGITS = 20  # in a row: a float has 17 significant ones, an integer of 64 bits 20
_STRINGS = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)
_LONG_NUMBER = re.compile(rb'^(?:[^"]|"")*[0-9]{%d}$' % MOST_DIGITS)
_SCHEMA = re.compile(r"^(.*%json )(\{.*\})$", re.MULTILINE)
_PAGE = resource.getpagesize()


def step(question: int, back: int, tokens: Sequence[int], token: int = 0) -> bytes:
    """The packet that takes back `back` tokens, takes `tokens`, and asks `question` about `token`."""
    return STEP_HEADER.pack(STEP, question, back, token) + array.array("I", tokens).tobytes()


class StructureFollower:
    """Follows an output through a structure; if it may end, any of `end_ids` ends it.

    `rest` checks the output's text, spelled by `text_of`, against the part of the structure that the matcher lacks.
    `digits`: the tokens that begin with a digit, a bit each; none follows MOST_DIGITS digits of a JSON number.
    """

    def __init__(
        self,
        matcher: Any,
        vocab_size: int,
        end_ids: Sequence[int],
        rest: Rest | None = None,
        text_of: Callable[[int], bytes] = lambda token: b"",
        digits: int = 0,
    ) -> None:
        self._matcher, self._vocab_size, self._end_ids = matcher, vocab_size, end_ids
        self._rest, self._text_of, self._digits = rest, text_of, digits
        self._of_calls = rest is not None and rest.of_calls  # which are checked before the output's end
        self._texts: list[bytes] = []
        self._ended = 0  # end-of-sequence tokens taken

    def mask(self) -> bytes:
        """Allowed tokens, a bit each."""
        mask = bytearray((self._vocab_size + 7) // 8)
        if not self._ended:
            made = self._matcher.compute_bitmask()[: len(mask)]
            self.check()
            mask[: len(made)] = made
        may_end, fault = self._may_end()
        if self._digits and _LONG_NUMBER.search(_STRINGS.sub(b'""', b"".join(self._texts))):
            left = int.from_bytes(mask, "little") & ~self._digits
            mask[:] = left.to_bytes(len(mask), "little") if left or may_end else mask
        for token in self._end_ids:
            mask[token // 8] &= ~(1 << token % 8)
            mask[token // 8] |= may_end << token % 8
        if fault and (self._of_calls or not any(mask)):
            raise ValueError(f"the output breaks it at {fault}")
        return bytes(mask)

    def advance(self, token: int) -> bool:
        # any spelling of a token is accepted; the mask has only the tokenizer's own
        if token in self._end_ids:
            may_end, _ = self._may_end()
            self._ended += may_end
            return may_end
        taken = not self._ended and bool(self._matcher.try_consume_tokens([token]))
        if taken and (self._rest or self._digits):
            self._texts.append(self._text_of(token))
        return taken

    def back(self, count: int) -> None:
        ends = min(self._ended, count)
        self._ended -= ends
        if count > ends:
            self._matcher.rollback(count - ends)
            del self._texts[ends - count :]

    def check(self) -> None:
        if self._matcher.is_error():
            raise ValueError(self._matcher.get_error())

    def _may_end(self) -> tuple[bool, str]:
        """Whether the output may end, and where it breaks the rest."""
        complete = not self._ended and self._matcher.is_accepting()
        if not self._rest or not (complete or self._of_calls):
            return self._ended > 0 or complete, ""
        fault = self._rest.fault(b"".join(self._texts).decode(errors="replace"))
        return self._ended > 0 or (complete and not fault), fault


class Bytes:
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
    """llguidance's form of a structure. Raises ValueError."""
    from llguidance import LLMatcher

    from tandem.engine.structure_schemas import rewritten

    def enforced(found: re.Match[str]) -> str:
        schema, dropped = rewritten(found[2], compiles)
        if dropped:
            raise ValueError(f"at {dropped} of %json: a grammar cannot say it; a json_schema is checked for it")
        return found[1] + schema

    if kind == "json_schema":
        return json_grammar(rewritten(text, compiles)[0])
    if kind == "grammar":
        text = _SCHEMA.sub(enforced, text)
    if kind == "choice":
        text = "start: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in json.loads(text))
    return str(LLMatcher.grammar_from_regex(text)) if kind == "regex" else lark(text)


def lark(text: str) -> str:
    from llguidance import LLMatcher

    return str(LLMatcher.grammar_from_lark(text))


def json_grammar(schema: str) -> str:
    # without optional whitespace, which some models would write forever; llguidance drops unknown keywords
    from llguidance import LLMatcher

    return str(LLMatcher.grammar_from_json_schema(schema, defaults={"whitespace_flexible": False, "lenient": True}))


def compiles(pattern: str) -> bool:
    return not fault(json.dumps({"type": "string", "pattern": pattern}))


def fault(schema: str) -> str:
    """Why llguidance does not compile a JSON schema, or ""."""
    from llguidance import LLMatcher

    return str(LLMatcher.validate_grammar(json_grammar(schema)))


class StructureWorker:
    """Serves one structure process. `given`: the vocabulary's spelling, and the limits."""

    def __init__(self, own: socket.socket, given: dict[str, Any]) -> None:
        self._own, self._given = own, given
        spelling = given["spelling"]
        spelled = spelling if isinstance(spelling, str) else [bytes.fromhex(token) for token in spelling]
        self._vocabulary = vocabulary_of(spelled, given["vocab_size"], given["end_ids"][0])
        spellings = (self._text_of(token) for token in range(given["vocab_size"]))
        self._digits = sum(1 << token for token, spelled in enumerate(spellings) if spelled[:1].isdigit())
        self._follower: StructureFollower | None = None
        self._text = b""
        self._packet = bytearray(PACKET + STEP_HEADER.size)

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
        fcntl.fcntl(self._own, fcntl.F_SETFL, os.O_RDWR)
        self._own.send(answer)

    def _compile(self, kind: str) -> bytes:
        import llguidance

        from tandem.engine import structure_schemas

        fcntl.fcntl(self._own, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(self._own, fcntl.F_SETFL, os.O_RDWR | os.O_ASYNC)  # SIGIO ends this process if the server leaves
        if select.select([self._own], [], [], 0)[0]:
            os._exit(0)  # it has left
        before, most = _address_space(), self._given["memory_bytes"]
        resource.setrlimit(resource.RLIMIT_AS, (before + most, before + most))
        limits = llguidance.LLParserLimits(max_lexer_states=self._given["lexer_states"], verbose_errors=False)
        text = self._text.decode("utf-8", "surrogatepass")
        calls, made, rest = kind == "grammar" and text.startswith(structure_schemas.CALLS), "", None
        if calls or kind == "json_schema":
            schema = text.removeprefix(structure_schemas.CALLS)
            made, dropped = structure_schemas.rewritten(schema, compiles)
            rest = structure_schemas.Rest(schema, calls) if dropped else None
            form = lark(structure_schemas.CALLS + made) if calls else json_grammar(made)
        else:
            form = grammar(kind, text)
        matcher = llguidance.LLMatcher(self._vocabulary, form, log_level=0, limits=limits)
        if made and matcher.is_error():
            why = (calls and fault(made)) or matcher.get_error()
            raise ValueError(structure_schemas.blamed(made, why, fault))
        given, digits = self._given, self._digits if kind == "json_schema" else 0
        self._follower = StructureFollower(matcher, given["vocab_size"], given["end_ids"], rest, self._text_of, digits)
        self._follower.check()
        if not any(self._follower.mask()):
            raise ValueError("no output can match it")
        return COMPILED.pack(bytes([DONE]), max(0, _address_space() - before))

    def _step(self, packet: memoryview) -> bytes:
        follower = self._follower
        assert follower is not None, "it is compiled first"
        _, question, back, token = STEP_HEADER.unpack_from(packet)
        tokens = array.array("I", packet[STEP_HEADER.size :].tobytes())
        if back:
            follower.back(back)
        taken = next((i for i, each in enumerate(tokens) if not follower.advance(each)), len(tokens))
        answer = b""
        if taken == len(tokens):
            if question == MASK:
                answer = follower.mask()
            elif question == ADVANCE:
                answer = bytes([follower.advance(token)])
        follower.check()
        return TAKEN.pack(bytes([DONE]), taken) + answer

    def _fork(self, fd: int | None) -> None:
        # the child answers on `fd`, closed on failure
        if fd is None:
            return
        given = socket.socket(fileno=fd)
        try:
            if os.fork():
                return given.close()
        except OSError:
            return given.close()
        self._own.close()
        self._own = given
        if self._follower:
            self._step(memoryview(step(MASK, 0, ())))  # touches what the first question will, while nobody waits

    def _received(self) -> tuple[int, int | None]:
        """The next packet's size and descriptor; ends at the socket's end."""
        room = socket.CMSG_SPACE(array.array("i").itemsize)
        size, ancillary, _, _ = self._own.recvmsg_into([self._packet], room)
        if not size:
            os._exit(0)
        fds = array.array("i", b"".join(data for _, _, data in ancillary))
        return size, fds[0] if fds else None


def _address_space() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[0]) * _PAGE


def main() -> None:
    own = socket.socket(fileno=int(sys.argv[1]))
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # it ends with the server, which may have requests to finish
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps what it forks
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        worker = StructureWorker(own, json.load(sys.stdin))
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
