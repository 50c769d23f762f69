"""Whom a certificate names: one identity for each name of each kind, and nobody is refused rather than anonymous."""

from __future__ import annotations

import ipaddress
from pathlib import Path

import grpc
import pytest
from cryptography import x509
from cryptography.x509.oid import NameOID, ObjectIdentifier

from tandem import installing
from tandem.rpc.channel import TARGET
from tandem.rpc.credentials import Credentials
from tandem.services.security.access import Security
from tandem.services.security.tls import TlsConfig
from tests.services.certificates import Authority
from tests.support import opening, raw_stub, target_site, toy

NOBODY = x509.Name([])
TEXT = "alice.example"


def subject(common_name: str, organisation: str | None = None) -> x509.Name:
    parts = [x509.NameAttribute(NameOID.COMMON_NAME, common_name)]
    parts += [x509.NameAttribute(NameOID.ORGANIZATION_NAME, organisation)] if organisation else []
    return x509.Name(parts)


# Each of them is somebody else: most have the same text.
CALLERS: dict[str, tuple[x509.Name, list[x509.GeneralName] | None]] = {
    f"dns:{TEXT}": (subject("Alice"), [x509.DNSName(TEXT), x509.DNSName("second.example")]),
    "dns:second.example": (subject("Alice"), [x509.DNSName("second.example"), x509.DNSName(TEXT)]),
    f"email:{TEXT}": (NOBODY, [x509.RFC822Name(TEXT)]),
    f"uri:{TEXT}": (NOBODY, [x509.UniformResourceIdentifier(TEXT)]),
    f"subject:CN={TEXT}": (subject(TEXT), None),
    f"subject:O=One,CN={TEXT}": (subject(TEXT, "One"), None),
    f"subject:O=Two,CN={TEXT}": (subject(TEXT, "Two"), None),
    "ip:10.1.2.3": (NOBODY, [x509.IPAddress(ipaddress.ip_address("10.1.2.3"))]),
    "dns:10.1.2.3": (NOBODY, [x509.DNSName("10.1.2.3")]),
}
REFUSED: dict[str, tuple[x509.Name, list[x509.GeneralName] | None]] = {
    "no name at all": (NOBODY, None),
    "an organisation without a common name": (
        x509.Name([x509.NameAttribute(NameOID.ORGANIZATION_NAME, "Corp")]),
        None,
    ),
    "a common name of spaces": (subject("  "), None),
    "an empty alternative name beside a common name": (subject("Alice"), [x509.DNSName("")]),
    "a name of another kind": (NOBODY, [x509.RegisteredID(ObjectIdentifier("1.2.3")), x509.DNSName(TEXT)]),
    "a name with a line feed": (NOBODY, [x509.DNSName("alice\nINFO forged")]),
    "a name that ends in NUL": (NOBODY, [x509.DNSName(TEXT + "\0")]),
}


async def opened(address: str, mine: Credentials) -> str:
    """What became of an OpenSession: OK, or the status."""
    async with raw_stub(address, TARGET, mine) as stub:
        try:
            await stub.OpenSession(opening())
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name}: {error.details()}"
        return "OK"


async def test_every_name_of_every_kind_is_an_identity_of_its_own(tmp_path: Path) -> None:
    """All of them open a session of one id; were two of them one, the second would resume the first's."""
    authority = Authority(tmp_path)
    callers = {name: authority.certify(str(i), *CALLERS[name]) for i, name in enumerate(CALLERS)}
    security = Security(tls=authority.server(mutual=True))
    async with target_site(toy(slots=len(callers)), security=security) as site:
        assert site.verifier
        for mine in callers.values():
            assert await opened(site.address, mine) == "OK"
        assert [session.session_id.owner for session in site.verifier.sessions] == list(CALLERS)


@pytest.mark.parametrize("case", REFUSED)
async def test_who_is_named_by_nothing_is_refused(case: str, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    mine = authority.certify("client", *REFUSED[case])
    async with target_site(security=Security(tls=authority.server(mutual=True))) as site:
        assert site.verifier
        said, sessions = await opened(site.address, mine), len(site.verifier.sessions)
    assert said.startswith("UNAUTHENTICATED: the client's certificate has no usable name: ") and said.isprintable()
    assert sessions == 0


def test_without_the_library_client_certificates_alone_are_refused_at_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tls = Authority(tmp_path).server(mutual=True)
    monkeypatch.setattr(installing, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"^tls_client_ca: cryptography is not installed; make setup"):
        Security(tls=tls)
    Security(tls=TlsConfig(tls.cert, tls.key))
