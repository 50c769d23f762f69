"""Certificates made for a test: an authority, and files of what it signed."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path

import trustme
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key

from tandem.rpc.credentials import Credentials
from tandem.services.security.tls import TlsConfig


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

    def certify(self, at: str, subject: x509.Name, names: list[x509.GeneralName] | None = None) -> Credentials:
        """A client whose certificate has just this subject and these alternative names; None: no extension."""
        key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(timezone.utc)
        authority = x509.load_pem_x509_certificate(self._authority.cert_pem.bytes())
        signing = load_pem_private_key(self._authority.private_key_pem.bytes(), None)
        made = (
            x509.CertificateBuilder(authority.subject, subject, key.public_key(), x509.random_serial_number())
            .not_valid_before(now - timedelta(days=1))
            .not_valid_after(now + timedelta(days=1))
        )
        if names is not None:
            made = made.add_extension(x509.SubjectAlternativeName(names), critical=not list(subject))
        pair = Pair(self._folder / f"{at}.pem", self._folder / f"{at}.key")
        pair.cert.write_bytes(made.sign(signing, hashes.SHA256()).public_bytes(Encoding.PEM))
        pair.key.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        pair.key.chmod(0o600)
        return Credentials(ca=str(self.ca), cert=str(pair.cert), key=str(pair.key))

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
