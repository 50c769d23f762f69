"""Bearer tokens and identities from a file, reread on change."""

from __future__ import annotations

import hashlib
import hmac
import re

from tandem.rpc.credentials import Reread, lines_of, warn_if_others_read

FLAG = "accept_tokens"
MIN_CHARACTERS = 16
_TOKEN = re.compile(r"[A-Za-z0-9._~+/=-]+")  # RFC 6750, b64token
_HASH = re.compile(r"sha256:([0-9a-f]{64})")

Entries = tuple[tuple[bytes, str], ...]


class AcceptedTokens:
    """Lines `identity token` or `identity sha256:HEX`; keeps hashes only. Raises ValueError at start."""

    def __init__(self, file: str) -> None:
        self._entries = Reread(lambda: read_tokens(file), file)
        if not self._entries.value:
            raise ValueError(f"{FLAG}: {file} has no line `identity token`")
        warn_if_others_read(FLAG, file)

    def identity(self, token: str) -> str | None:
        """Returns the token's identity or None, in constant time."""
        presented, found = hashlib.sha256(token.encode()).digest(), None
        for accepted, identity in self._entries.current():
            if hmac.compare_digest(presented, accepted):
                found = identity
        return found


def read_tokens(file: str) -> Entries:
    """Returns hash and identity per line. Raises ValueError naming the line, never the token."""
    entries: dict[bytes, str] = {}
    for number, line in lines_of(FLAG, file):
        where = f"{FLAG}: {file}, line {number}"
        words = line.split()
        if len(words) != 2:
            raise ValueError(f"{where}: {len(words)} words; a line is `identity token`")
        digest = _digest(words[1], where)
        if digest in entries:
            raise ValueError(f"{where}: an earlier line has the same token")
        entries[digest] = words[0]
    return tuple(entries.items())


def _digest(word: str, where: str) -> bytes:
    hashed = _HASH.fullmatch(word)
    if hashed:
        return bytes.fromhex(hashed[1])
    if len(word) < MIN_CHARACTERS:
        raise ValueError(f"{where}: a token of {len(word)} characters; the minimum is {MIN_CHARACTERS}")
    if not _TOKEN.fullmatch(word):
        raise ValueError(f"{where}: a token consists of letters, digits and . _ ~ + / = -")
    return hashlib.sha256(word.encode()).digest()
