"""Certificates made for a test: an authority, and files of what it signed."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path

import trustme

from clients.credentials import Credentials
from services.tls import TlsConfig


@dataclass(frozen=True)
class Pair:
    """A certificate and its key."""

    cert: Path
    key: Path


class Authority:
    """A certificate authority whose files are in `folder`."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._authority = folder, trustme.CA()
        self.ca = folder / "ca.pem"
        self._authority.cert_pem.write_to_path(str(self.ca))

    def issue(self, *names: str, common_name: str | None = None, expired: bool = False, at: str | None = None) -> Pair:
        """A new pair for these names, in files that `at` names: the same name writes over the last one's."""
        at = at or names[0]
        yesterday = datetime.now(timezone.utc) - timedelta(days=1)
        dates = {"not_before": yesterday - timedelta(days=1), "not_after": yesterday} if expired else {}
        issued = self._authority.issue_cert(*names, common_name=common_name, **dates)
        pair = Pair(self._folder / f"{at}.pem", self._folder / f"{at}.key")
        issued.private_key_pem.write_to_path(str(pair.key))
        pair.key.chmod(0o600)
        pair.cert.write_bytes(b"".join(part.bytes() for part in issued.cert_chain_pems))
        return pair

    def server(self, mutual: bool = False, **how: bool) -> TlsConfig:
        """What a server on loopback shows; `mutual`: and asks of clients."""
        pair = self.issue("127.0.0.1", **how)
        return TlsConfig(str(pair.cert), str(pair.key), str(self.ca) if mutual else None)

    def client(self, name: str | None = None, **how: bool) -> Credentials:
        """What a client shows and trusts."""
        if name is None:
            return Credentials(ca=str(self.ca))
        pair = self.issue(name, **how)
        return Credentials(ca=str(self.ca), cert=str(pair.cert), key=str(pair.key))


def token_file(file: Path, text: str) -> str:
    """A file of tokens that its owner alone can read."""
    file.write_text(text)
    file.chmod(0o600)
    return str(file)
