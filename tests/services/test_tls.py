"""TLS and mTLS with certificates made here: who gets in, who does not, and certificates that change meanwhile."""

from __future__ import annotations

import dataclasses
import logging
import shutil
from pathlib import Path

import pytest

from tandem.rpc.credentials import Credentials
from tandem.rpc.received_errors import TandemError
from tandem.services.security.access import Security
from tandem.services.security.tls import TlsConfig
from tests.services.certificates import Authority
from tests.support import GREEDY, HANG, answer, ids, oracle, run, target_site

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
