"""TLS: who is served, certificates that are replaced without a restart, and whom a client's certificate names."""

from __future__ import annotations

import dataclasses
import ipaddress
import logging
import shutil
from pathlib import Path

import grpc
import pytest
from cryptography import x509
from cryptography.x509.oid import NameOID, ObjectIdentifier

from tandem import installing
from tandem.rpc.channel import TARGET
from tandem.rpc.credentials import Credentials
from tandem.rpc.received_errors import TandemError
from tandem.services.security.access import Security
from tandem.services.security.tls import TlsConfig
from tests.services.certificates import Authority
from tests.support import GREEDY, HANG, answer, ids, opening, oracle, raw_stub, run, target_site, toy

PROMPT = b"over an encrypted wire"
WHAT_THE_TARGET_SAYS = oracle(PROMPT, GREEDY, 8)


async def asked(site, credentials: Credentials | None) -> tuple[int, ...]:
    async with site.client(credentials) as client:
        return (await answer(lambda r: client.generate(r, timeout=HANG), ids(PROMPT, 8))).token_ids


NOT_SERVED = {
    "the client trusts another authority": (False, lambda ours, theirs: theirs.client()),
    "the client speaks no TLS": (False, lambda ours, theirs: None),
    "the client shows no certificate": (True, lambda ours, theirs: ours.client()),
    "the client's certificate is another authority's": (
        True,
        lambda ours, theirs: dataclasses.replace(theirs.client("alice.example"), ca=str(ours.ca)),
    ),
    "the client's certificate has expired": (True, lambda ours, theirs: ours.client("alice.example", expired=True)),
    "the server's name is not the one expected": (
        False,
        lambda ours, theirs: dataclasses.replace(ours.client(), server_name="other.example"),
    ),
}


@pytest.mark.parametrize("case", NOT_SERVED)
async def test_nobody_is_served_where(case, tmp_path):
    mutual, credentials = NOT_SERVED[case]
    ours, theirs = Authority(tmp_path / "ours"), Authority(tmp_path / "theirs")
    async with target_site(security=Security(tls=ours.server(mutual))) as site:
        with pytest.raises(TandemError) as refused:
            await asked(site, credentials(ours, theirs))
        after = await asked(site, ours.client("bob.example"))  # and nobody else notices
    assert (refused.value.code, after) == ("UNAVAILABLE", WHAT_THE_TARGET_SAYS)


async def test_a_server_may_be_known_by_another_name_than_its_host(tmp_path):
    authority = Authority(tmp_path)
    pair = authority.issue("target.example")
    named = dataclasses.replace(authority.client(), server_name="target.example")
    async with target_site(security=Security(tls=TlsConfig(str(pair.cert), str(pair.key)))) as site:
        assert await asked(site, named) == WHAT_THE_TARGET_SAYS


async def test_certificates_are_replaced_without_a_restart(tmp_path):
    old, new = Authority(tmp_path / "old"), Authority(tmp_path / "new")
    config = old.server()
    async with target_site(security=Security(tls=config)) as site:
        before = await asked(site, old.client())
        issued = new.issue("127.0.0.1")
        shutil.copy(issued.key, config.key)
        shutil.copy(issued.cert, config.cert)
        after = await asked(site, new.client())
        with pytest.raises(TandemError):
            await asked(site, old.client())
    assert (before, after) == (WHAT_THE_TARGET_SAYS, WHAT_THE_TARGET_SAYS)


async def test_clients_that_are_trusted_change_without_a_restart(tmp_path):
    ours, theirs = Authority(tmp_path / "ours"), Authority(tmp_path / "theirs")
    config = ours.server(mutual=True)
    shutil.copy(ours.ca, tmp_path / "servers.pem")  # the server's list of clients changes, the clients' of servers not
    newcomer = dataclasses.replace(theirs.client("bob.example"), ca=str(tmp_path / "servers.pem"))
    async with target_site(security=Security(tls=config)) as site:
        with pytest.raises(TandemError):
            await asked(site, newcomer)
        Path(config.client_ca).write_bytes(ours.ca.read_bytes() + theirs.ca.read_bytes())
        assert await asked(site, newcomer) == WHAT_THE_TARGET_SAYS


def test_a_certificate_that_was_replaced_without_its_key_is_not_used(tmp_path, caplog):
    authority = Authority(tmp_path)
    config = authority.server()

    async def test():
        async with target_site(security=Security(tls=config)) as site:
            shutil.copy(authority.issue("127.0.0.1", at="next").cert, config.cert)
            said = await asked(site, authority.client())
            again = await asked(site, authority.client())
        return said, again

    with caplog.at_level(logging.INFO, "tandem.security"):
        assert run(test()) == (WHAT_THE_TARGET_SAYS, WHAT_THE_TARGET_SAYS)
    said = [record.getMessage() for record in caplog.records if "keeping the old one" in record.getMessage()]
    assert len(said) == 1, "said once for each change"


def test_a_key_that_is_not_the_certificates_is_refused(tmp_path):
    authority = Authority(tmp_path)
    one, other = authority.issue("one.example"), authority.issue("other.example")
    with pytest.raises(ValueError, match=r"tls_key: .*other.example.key is not the key of .*one.example.pem"):
        TlsConfig(str(one.cert), str(other.key))


def test_a_file_of_authorities_without_certificates_is_refused(tmp_path):
    pair = Authority(tmp_path).issue("one.example")
    (tmp_path / "empty.pem").write_text("nothing\n")
    with pytest.raises(ValueError, match=r"tls_client_ca: .*empty.pem holds no PEM certificate"):
        TlsConfig(str(pair.cert), str(pair.key), str(tmp_path / "empty.pem"))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"cert": "c.pem"}, "tls_client_cert: given without tls_client_key"),
        ({"key": "c.key"}, "tls_client_key: given without tls_client_cert"),
        ({"cert": "c.pem", "key": "c.key"}, "tls_client_cert: given without tls_ca"),
        ({"server_name": "target"}, "tls_server_name: given without tls_ca"),
        ({"ca": "absent.pem"}, "tls_ca: absent.pem: No such file or directory"),
        ({"token_file": "a", "token_env": "B"}, "token_file: give either token_file or token_env"),
        ({"token_env": "TANDEM_TOKEN_THAT_IS_ABSENT"}, "token_env: TANDEM_TOKEN_THAT_IS_ABSENT holds no token"),
    ],
)
def test_a_callers_credentials_are_checked(given, said):
    with pytest.raises(ValueError) as refused:
        Credentials(**given)
    assert str(refused.value) == said


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
    "an organisation without a common name": (x509.Name([x509.NameAttribute(NameOID.ORGANIZATION_NAME, "Corp")]), None),
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
