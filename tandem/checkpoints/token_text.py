"""Streams tokens' text, equal to one decode of all."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Container, Sequence
from typing import Any


def byte_characters() -> list[str]:
    """Returns the character of each byte in byte-level vocabularies (GPT-2's table)."""
    shown = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in shown else chr(next(others)) for byte in range(256)]


BYTE = re.compile("<0x([+0-9A-Fa-f][0-9A-Fa-f])>")
_OF_TOKENS = {"Replace", "ByteFallback", "Strip", "Metaspace", "WordPiece", "BPEDecoder"}
_NONE, _ALL = re.compile("(?!)"), re.compile("(?s:.*)")


def decoding_steps(backend: Any) -> list[str]:
    """Returns a decoder's step names; Fuse alone has no effect."""
    if backend.decoder is None:
        return []
    said = json.loads(backend.decoder.__getstate__())
    names = [str(step["type"]) for step in said.get("decoders", [said])]
    return names if len(names) < 2 or names[1:] != ["Fuse"] else names[:1]


def held_tokens(steps: Sequence[str]) -> re.Pattern[str]:
    """Matches tokens without text until others follow; unknown decoder steps hold all tokens."""
    before, after = list(steps), []
    if "Fuse" in before:
        before, after = before[: before.index("Fuse")], before[before.index("Fuse") + 1 :]
    if not _OF_TOKENS.issuperset(before) or not {"Strip", "Fuse"}.issuperset(after):
        return _ALL
    return BYTE if "ByteFallback" in before else _NONE


class ByteText:
    def __init__(self, bytes_of: Callable[[int], bytes]) -> None:
        self._bytes_of = bytes_of
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        return self._decoder.decode(self._bytes_of(token))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class TokenText:
    """Streams tokens whose text depends on neighbours. `_tail`: the last with returned text, and held ones."""

    def __init__(self, backend: Any, skipped: Container[int], held: re.Pattern[str]) -> None:
        self._backend, self._skipped, self._held = backend, skipped, held
        self._tail: list[int] = []
        self._shown = 0

    def push(self, token: int) -> str:
        spelt = None if token in self._skipped else self._backend.id_to_token(token)
        if spelt is None:
            return ""
        self._tail.append(token)
        if self._held.fullmatch(spelt):
            return ""
        text = self._decode(self._tail)
        fresh, self._shown = text[self._shown :], len(text)
        for cut in (self._tail[-1:], self._tail[-2:]):
            if own := self._decode(cut):
                self._tail, self._shown = cut, len(own)
                break
        return fresh

    def flush(self) -> str:
        fresh = self._decode(self._tail)[self._shown :]
        self._tail, self._shown = [], 0
        return fresh

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(self._backend.decode(tokens, skip_special_tokens=True))
