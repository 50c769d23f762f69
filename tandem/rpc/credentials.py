"""A caller's credentials from files: CA, client certificate, bearer token."""

from __future__ import annotations

import ipaddress
import logging
import os
import ssl
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from tandem.speculation.errors import InvalidField, WrongType

log = logging.getLogger("tandem.security")
Value = TypeVar("Value")


OPTIONS = {
    "tls_ca": "ca",
    "tls_client_cert": "cert",
    "tls_client_key": "key",
    "tls_server_name": "server_name",
    **{name: name for name in ("token_file", "token_env", "insecure")},
}
"""By option, the field of Credentials."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """A caller's TLS files and token, as its flags. Raises InvalidField.

    `cert`, `key`: the caller's own (mTLS). Without `insecure` the token leaves this machine only through TLS.
    """

    ca: str | None = None
    cert: str | None = None
    key: str | None = None
    server_name: str | None = None
    token_file: str | None = None
    token_env: str | None = None
    insecure: bool = False

    def __post_init__(self) -> None:
        for name in ("ca", "cert", "key", "server_name", "token_file", "token_env"):
            if not isinstance(value := getattr(self, name), str | os.PathLike | None):
                raise WrongType(name, "a string, or None", value)
        if (self.cert is None) != (self.key is None):
            one, other = ("cert", "key") if self.key is None else ("key", "cert")
            raise InvalidField(f"tls_client_{one}", f"given without tls_client_{other}")
        for flag, value in (("tls_client_cert", self.cert), ("tls_server_name", self.server_name)):
            if value is not None and self.ca is None:
                raise InvalidField(flag, "given without tls_ca")
        if self.token_file is not None and self.token_env is not None:
            raise InvalidField("token_file", "give either token_file or token_env")
        self._check_files()

    def _check_files(self) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        if self.ca is not None:
            check_readable("tls_ca", self.ca)
            try:
                context.load_verify_locations(self.ca)
            except ssl.SSLError:
                raise InvalidField("tls_ca", f"{self.ca} holds no PEM certificate") from None
        if self.cert is not None and self.key is not None:
            check_readable("tls_client_cert", self.cert)
            check_readable("tls_client_key", self.key)
            try:
                context.load_cert_chain(self.cert, self.key, password="")
            except (ssl.SSLError, ValueError):
                raise InvalidField("tls_client_key", f"{self.key} is not the key of {self.cert}") from None
            warn_if_others_read("tls_client_key", self.key)
        self.token()

    def token(self) -> Callable[[], str] | None:
        if self.token_file is not None:
            return _rereading(self.token_file)
        if self.token_env is not None:
            token = _checked("token_env", self.token_env, os.environ.get(self.token_env, "").strip())
            return lambda: token
        return None

    def flags(self) -> list[str]:
        named = {f"--{option}": getattr(self, name) for option, name in OPTIONS.items() if name != "insecure"}
        given = [part for flag, value in named.items() if value is not None for part in (flag, value)]
        return [*given, "--insecure"] if self.insecure else given

    def check(self, address: str) -> None:
        """Raises ValueError if any comma-separated address would get the token in clear text."""
        away = [one for one in address.split(",") if not on_this_machine(one.rpartition(":")[0])]
        if away and self.ca is None and not self.insecure and (self.token_file or self.token_env):
            flag = "token_file" if self.token_file else "token_env"
            clear = f"the token would be sent to {address} in clear text; give --tls_ca, or pass --insecure"
            raise InvalidField(flag, clear)


def _rereading(file: str) -> Callable[[], str]:
    tokens = Reread(lambda: _read(file), file)
    warn_if_others_read("token_file", file)
    return tokens.current


def _read(file: str) -> str:
    lines = lines_of("token_file", file)
    if len(lines) != 1:
        raise InvalidField("token_file", f"{file} has {len(lines)} lines; it holds one token")
    return _checked("token_file", file, lines[0][1])


def _checked(flag: str, where: str, token: str) -> str:
    if not token:
        raise InvalidField(flag, f"{where} holds no token")
    if len(token.split()) != 1 or not token.isascii() or not token.isprintable():
        raise InvalidField(flag, f"{where} holds more than one token, or characters not allowed in a token")
    return token


def on_this_machine(host: str) -> bool:
    host = host.strip("[]")
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def pem_of(file: str | None) -> bytes | None:
    return None if file is None else Path(file).read_bytes()


def check_readable(flag: str, file: str) -> None:
    try:
        with Path(file).open("rb"):
            pass
    except OSError as error:
        raise InvalidField(flag, f"{file}: {error.strerror}") from None


def warn_if_others_read(flag: str, file: str) -> None:
    mode = stat.S_IMODE(os.stat(file).st_mode)
    if mode & (stat.S_IRGRP | stat.S_IROTH):
        log.warning("%s: %s can be read by others (mode %o); chmod 600 is enough", flag, file, mode)


class Reread(Generic[Value]):
    """A value read from files, and again when they change; unusable files keep the value and are logged once."""

    def __init__(self, read: Callable[[], Value], *files: str) -> None:
        self._read, self._files = read, files
        self._signature = self._now()
        self.value = read()

    def _now(self) -> tuple[tuple[int, int, int], ...]:
        try:
            found = [os.stat(file) for file in self._files]
        except OSError:
            return ()
        return tuple((status.st_ino, status.st_size, status.st_mtime_ns) for status in found)

    def current(self) -> Value:
        self.changed()
        return self.value

    def changed(self) -> bool:
        """Whether the value is a new one."""
        now = self._now()
        if now == self._signature:
            return False
        self._signature = now
        try:
            self.value = self._read()
        except (OSError, ValueError) as error:
            log.error("cannot use the new %s, keeping the old one: %s", self._files[0], error)
            return False
        log.info("reloaded: %s", self._files[0])
        return True


def lines_of(flag: str, file: str) -> Sequence[tuple[int, str]]:
    try:
        text = Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidField(flag, f"{file}: {getattr(error, 'strerror', None) or 'not UTF-8 text'}") from None
    numbered = ((number, line.strip()) for number, line in enumerate(text.splitlines(), 1))
    return [(number, line) for number, line in numbered if line and not line.startswith("#")]
