"""Parses tool calls in a model's output."""

from __future__ import annotations

import hashlib
import json
import re
import uuid
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tandem.speculation.stopping import TextStream
from tandem.speculation.types import Chunk

Delta = dict[str, Any]  # part of a message: `content` or `tool_calls`
Call = tuple[str, dict[str, Any]]
_DECODER = json.JSONDecoder()
_DEEPSEEK = re.compile(
    r"<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>)?(.+?)(?:<｜tool▁sep｜>|\n)(.*?)<｜tool▁call▁end｜>", re.DOTALL
)
_BARE = re.compile(r'\s*\{\s*"(name|type)"')
_NAMED = re.compile(r"\s*(?:\[TOOL_CALLS\])?\s*([\w.-]+)\s*(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?\s*(?={)")


def _objects(text: str) -> Iterator[Call]:
    # Raises ValueError, KeyError or TypeError.
    at = 0
    while (begin := text.find("{", at)) >= 0:
        found, at = _DECODER.raw_decode(text, begin)
        arguments = found.get("arguments", found.get("parameters", {}))
        yield found["name"], arguments
    if text[at:].strip(" ,;]\n") or not at:
        raise ValueError("something else follows")


def _mistral(text: str) -> Iterator[Call]:
    # Mistral's tokenizers since version 11 write names, each before its arguments.
    if not (named := _NAMED.match(text)):
        yield from _objects(text)
        return
    while named:
        arguments, end = _DECODER.raw_decode(text, named.end())
        yield named[1], arguments
        named = _NAMED.match(text, end)


def _deepseek(text: str) -> Iterator[Call]:
    for name, arguments in _DEEPSEEK.findall(text):
        yield name.strip(), json.loads(arguments.strip().removeprefix("```json").removesuffix("```"))


@dataclass(frozen=True, slots=True)
class Format:
    """`bare`: calls may lack `begin`. `marks`: other special tokens. `id_length`: characters of a call id."""

    begin: str
    end: str
    read: Callable[[str], Iterator[Call]]
    marks: tuple[str, ...] = ()
    bare: bool = False
    id_length: int = 24

    def new_id(self) -> str:
        made = uuid.uuid4().hex[: self.id_length]
        return made if self.id_length < 10 else f"call_{made}"

    def shown(self, message: dict[str, Any]) -> dict[str, Any]:
        if self.id_length > 9:
            return message
        own = {key: _short(message[key]) for key in ("tool_call_id",) if key in message}
        calls = [{**each, "id": _short(each["id"])} for each in message.get("tool_calls", ())]
        return {**message, **own, **({"tool_calls": calls} if calls else {})}


def _short(name: str) -> str:
    # Deterministic: nine letters and digits.
    fits = len(name) == 9 and name.isascii() and name.isalnum()
    return name if fits else hashlib.sha256(name.encode()).hexdigest()[:9]


FORMATS = {
    "hermes": Format("<tool_call>", "</tool_call>", _objects),
    "llama3": Format("<|python_tag|>", "", _objects, bare=True),
    "mistral": Format("[TOOL_CALLS]", "", _mistral, ("[ARGS]", "[CALL_ID]"), id_length=9),
    "deepseek": Format(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        _deepseek,
        ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
    ),
}  # by the names of tool_prompts.FORMATS


class MarkedText:
    """Restores the special tokens that mark calls; `stream` decodes again, so a mark precedes text held back at it."""

    def __init__(self, stream: TextStream, marks: Mapping[int, str]) -> None:
        self._stream, self._marks = stream, marks
        self._pieces: deque[tuple[bool, str]] = deque()  # whether it is a mark, and its text

    def text(self, chunk: Chunk) -> str:
        for token in chunk.token_ids:
            self._pieces += [(False, self._stream.push(token)), (True, self._marks.get(token, ""))]
        left = len(chunk.text)
        if left > sum(len(text) for is_mark, text in self._pieces if not is_mark):
            self._pieces.append((False, self._stream.flush()))  # the output ends
        found = ""
        while self._pieces:
            is_mark, text = self._pieces.popleft()
            shown = text if is_mark else text[:left]
            found += shown
            left -= 0 if is_mark else len(shown)
            if len(shown) < len(text):
                self._pieces.appendleft((False, text[len(shown) :]))
                break
        return found


class Parser:
    """Turns output text into message deltas; this one treats all as content. `several`: calls may follow calls."""

    def __init__(self, form: Format, names: Collection[str] = (), several: bool = True) -> None:
        self._format, self._names, self._several, self.calls = form, names, several, 0

    def add(self, text: str) -> list[Delta]:
        return [{"content": text}] if text else []

    def end(self, cut: bool) -> list[Delta]:
        """Returns the rest. `cut`: at the token limit, where a partial call is dropped."""
        return []

    def _call(self, name: str, arguments: str) -> Delta:
        self.calls += 1
        function = {"name": name, "arguments": arguments}
        made = {"index": self.calls - 1, "id": self._format.new_id(), "type": "function"}
        return {"tool_calls": [{**made, "function": function}]}


class NamedCall(Parser):
    def add(self, text: str) -> list[Delta]:
        if not self.calls:
            (name,) = self._names
            return [self._call(name, text)]
        return [{"tool_calls": [{"index": 0, "function": {"arguments": text}}]}] if text else []


class RequiredCalls(Parser):
    """The output is a list of calls, streamed as each completes."""

    _rest = ""

    def add(self, text: str) -> list[Delta]:
        self._rest += text
        found: list[Delta] = []
        while "}" in text and (begin := self._rest.find("{")) >= 0:
            try:
                call, end = _DECODER.raw_decode(self._rest, begin)
            except ValueError:
                break
            found.append(self._call(call["name"], _compact(call["arguments"])))
            self._rest = self._rest[end:]
        return found


class MarkedCalls(Parser):
    """Parses calls between marks; text that is no known call is content."""

    _held, _inside, _after_call, _begun = "", False, False, False

    def add(self, text: str) -> list[Delta]:
        self._held += text
        found: list[Delta] = []
        while True:
            mark = self._format.end if self._inside else self._format.begin
            before, seen, after = self._held.partition(mark) if mark else (self._held, "", "")
            if not seen:
                break
            found += self._between(before, mark) if self._inside else self._content(before)
            self._held, self._inside = after, not self._inside
        if not self._inside and not (self._bare and not found):
            kept = _overlap(self._held, self._format.begin)
            found += self._content(self._held[: len(self._held) - kept])
            self._held = self._held[len(self._held) - kept :]
        return found

    def end(self, cut: bool) -> list[Delta]:
        if self._inside or self._bare:
            return self._between(self._held, "", cut)
        return self._content(self._held)

    @property
    def _bare(self) -> bool:
        return self._format.bare and not self._begun and self._held.lstrip()[:1] in ("{", "")

    def _content(self, text: str) -> list[Delta]:
        text = text.lstrip() if self._after_call else text
        self._after_call = self._after_call and not text
        self._begun = self._begun or bool(text)
        return [{"content": text}] if text else []

    def _between(self, text: str, end: str, cut: bool = False) -> list[Delta]:
        try:
            calls = [(name, arguments) for name, arguments in self._format.read(text)]
            if calls and all(name in self._names and isinstance(arguments, dict) for name, arguments in calls):
                self._after_call = True
                room = len(calls) if self._several else 1 - self.calls
                return [self._call(name, _compact(arguments)) for name, arguments in calls[:room]]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            pass
        begin, self._after_call = self._format.begin if self._inside else "", False
        return [] if cut and (begin or _BARE.match(text)) else self._content(f"{begin}{text}{end}")


def folded(deltas: list[Delta]) -> Delta:
    content = "".join(each["content"] for each in deltas if "content" in each)
    calls: list[dict[str, Any]] = []
    for part in (call for each in deltas for call in each.get("tool_calls", ())):
        if part["index"] == len(calls):
            calls.append({"id": part["id"], "type": "function", "function": dict(part["function"])})
        else:
            calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]
    message: Delta = {"role": "assistant", "content": content if content or not calls else None, "refusal": None}
    return {**message, "tool_calls": calls} if calls else message


def _overlap(text: str, mark: str) -> int:
    """Returns how many trailing characters may begin a mark."""
    return next((n for n in range(min(len(text), len(mark) - 1), 0, -1) if text.endswith(mark[:n])), 0)


def _compact(arguments: Any) -> str:
    return json.dumps(arguments, ensure_ascii=False, separators=(",", ":"))
