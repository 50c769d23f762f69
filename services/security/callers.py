"""Identifies callers by certificate, or by token of a file that is reread on change, before any other work."""

from __future__ import annotations

import functools
import hashlib
import hmac
import re
from contextvars import ContextVar
from typing import TYPE_CHECKING

import grpc

from tandem.rpc.credentials import Reread, lines_of, warn_if_others_read
from tandem.rpc.request_context import PREFIX_SCOPE, set_prefix_scope
from tandem.services.statuses import Unauthenticated

if TYPE_CHECKING:
    from tandem.services.calls import Call

ANONYMOUS = ""
REMEMBERED_CERTIFICATES = 1024
_CALLER: ContextVar[str] = ContextVar("caller", default=ANONYMOUS)
OPEN = "/grpc.health.v1.Health/"  # probes have no token, and learn only readiness
_SCHEME = "bearer "
FLAG = "accept_tokens"
MIN_CHARACTERS = 16
_TOKEN = re.compile(r"[A-Za-z0-9._~+/=-]+")  # RFC 6750, b64token
_HASH = re.compile(r"sha256:([0-9a-f]{64})")
Entries = tuple[tuple[bytes, str], ...]


def caller() -> str:
    return _CALLER.get()


def identify(tokens: AcceptedTokens | None, call: Call) -> None:
    """Sets the caller and prefix scope of this task, which is the call's own. Raises Unauthenticated."""
    identity = _of_token(tokens, call.given("authorization")) if tokens is not None else _certified(call.context)
    _CALLER.set(identity)
    set_prefix_scope(identity, next(iter(call.given(PREFIX_SCOPE)), ""))


def _of_token(tokens: AcceptedTokens, given: list[str]) -> str:
    if len(given) != 1 or not given[0].lower().startswith(_SCHEME):
        raise Unauthenticated("no token: this server requires one, as metadata `authorization: Bearer TOKEN`")
    identity = tokens.identity(given[0][len(_SCHEME) :].strip())
    if identity is None:
        raise Unauthenticated("unknown token: it is wrong, or was revoked")
    return identity


def _certified(context: grpc.aio.ServicerContext) -> str:
    shown = context.auth_context().get("x509_pem_cert")
    if not shown:
        return ANONYMOUS
    try:
        return _named(shown[0])
    except ValueError as error:
        raise Unauthenticated(f"the client's certificate has no usable name: {error}") from None


@functools.lru_cache(REMEMBERED_CERTIFICATES)
def _named(certificate: bytes) -> str:
    # Cached: a caller presents the same certificate in every call.
    from tandem.services.security.certificates import identity_of

    return identity_of(certificate)


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
