"""Bearer tokens that a server accepts, and whose they are: a file, read again when it changes."""

from __future__ import annotations

import hashlib
import hmac
import logging
import re

from tandem.rpc.secret_files import lines_of, signature, warn_if_others_read

log = logging.getLogger("tandem.security")

FLAG = "accept_tokens"
LEAST_CHARACTERS = 16
_TOKEN = re.compile(r"[A-Za-z0-9._~+/=-]+")  # RFC 6750, b64token
_HASH = re.compile(r"sha256:([0-9a-f]{64})")

Entries = tuple[tuple[bytes, str], ...]


class AcceptedTokens:
    """`identity token` or `identity sha256:HEX` a line; # begins a comment. An identity may have several tokens.

    Only hashes are kept. Raises ValueError where the file cannot be used at start; later the last good one counts.
    """

    def __init__(self, file: str) -> None:
        self._file = file
        self._entries = read_tokens(file)
        if not self._entries:
            raise ValueError(f"{FLAG}: {file} has no line `identity token`")
        self._signature = signature(file)
        warn_if_others_read(FLAG, file)

    def identity(self, token: str) -> str | None:
        """Whose token it is. Takes as long for a wrong one, of any length, as for a right one."""
        self._refresh()
        presented, found = hashlib.sha256(token.encode()).digest(), None
        for accepted, identity in self._entries:
            if hmac.compare_digest(presented, accepted):
                found = identity
        return found

    def _refresh(self) -> None:
        """Says once what became of a change; a file that is gone is a change too."""
        try:
            now = signature(self._file)
        except OSError:
            now = ()
        if now == self._signature:
            return
        self._signature = now
        try:
            self._entries = read_tokens(self._file)
        except ValueError as error:
            log.error("the tokens' new file is not used, the old tokens stay: %s", error)
        else:
            log.info("tokens read again: %d in %s", len(self._entries), self._file)


def read_tokens(file: str) -> Entries:
    """Hash and identity of each line. Raises ValueError naming the line, and never the token."""
    entries: dict[bytes, str] = {}
    for number, line in lines_of(FLAG, file):
        where = f"{FLAG}: {file}, line {number}"
        words = line.split()
        if len(words) != 2:
            raise ValueError(f"{where}: {len(words)} words; a line is `identity token`")
        digest = _digest(words[1], where)
        if digest in entries:
            raise ValueError(f"{where}: the same token stands in an earlier line")
        entries[digest] = words[0]
    return tuple(entries.items())


def _digest(word: str, where: str) -> bytes:
    hashed = _HASH.fullmatch(word)
    if hashed:
        return bytes.fromhex(hashed[1])
    if len(word) < LEAST_CHARACTERS:
        raise ValueError(f"{where}: a token of {len(word)} characters; {LEAST_CHARACTERS} are the least")
    if not _TOKEN.fullmatch(word):
        raise ValueError(f"{where}: a token consists of letters, digits and . _ ~ + / = -")
    return hashlib.sha256(word.encode()).digest()
