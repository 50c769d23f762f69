"""Bearer tokens: the file, whose they are, changes without a restart; what callers send and where."""

from __future__ import annotations

import hashlib
import hmac
import logging

import pytest

from tandem.rpc.channel import open_channel
from tandem.rpc.credentials import Credentials, on_this_machine
from tandem.rpc.received_errors import TandemError
from tandem.services.security.access import Security
from tandem.services.security.callers import AcceptedTokens
from tests.services.certificates import token_file
from tests.support import GREEDY, answer, ids, oracle, run, target_site, worker_site

ALICE, BOB, NEW = "alices-token-0123456789", "bobs-token-0123456789ab", "a-new-token-0123456789"
FILE = f"# who may call\n\nalice {ALICE}\nbob\t{BOB}\n"
PROMPT = b"who goes there?"
WHAT_THE_TARGET_SAYS = oracle(PROMPT, GREEDY, 8)


@pytest.fixture
def accepted(tmp_path):
    return token_file(tmp_path / "accepted", FILE)


def shown(tmp_path, token: str) -> Credentials:
    return Credentials(token_file=token_file(tmp_path / "token", f"{token}\n"))


async def asked(site, credentials: Credentials | None) -> tuple[int, ...] | str:
    """What was said, or the status."""
    async with site.client(credentials) as client:
        try:
            return (await answer(client.generate, ids(PROMPT, 8))).token_ids
        except TandemError as error:
            return f"{error.code}: {error.message}"


def test_a_token_says_whose_it_is(accepted):
    tokens = AcceptedTokens(accepted)
    assert [tokens.identity(token) for token in (ALICE, BOB)] == ["alice", "bob"]
    assert {tokens.identity(token) for token in (ALICE[:-1], ALICE + "x", "")} == {None}


def test_an_identity_may_have_several_tokens_and_a_token_may_stand_there_as_its_hash(tmp_path):
    hashed = hashlib.sha256(NEW.encode()).hexdigest()
    tokens = AcceptedTokens(token_file(tmp_path / "accepted", f"alice {ALICE}\nalice sha256:{hashed}\n"))
    assert (tokens.identity(ALICE), tokens.identity(NEW)) == ("alice", "alice")
    assert tokens.identity(f"sha256:{hashed}") is None, "whoever reads the file has no token"


def test_every_token_is_compared_whole_whatever_was_shown(accepted, monkeypatch):
    compared: list[tuple[int, int]] = []
    real = hmac.compare_digest

    def noting(one: bytes, other: bytes) -> bool:
        compared.append((len(one), len(other)))
        return real(one, other)

    monkeypatch.setattr(hmac, "compare_digest", noting)
    tokens = AcceptedTokens(accepted)
    for token in (ALICE, BOB, "wrong", "x" * 10_000):
        compared.clear()
        tokens.identity(token)
        assert compared == [(32, 32), (32, 32)], "no earlier end, and no length to be seen"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "has no line `identity token`"),
        ("# nobody yet\n", "has no line `identity token`"),
        ("alice\n", "line 1: 1 words; a line is `identity token`"),
        (f"# two\nalice {ALICE} {BOB}\n", "line 2: 3 words; a line is `identity token`"),
        ("alice short\n", "line 1: a token of 5 characters; the minimum is 16"),
        ("alice tökens-are-plain-letters\n", "line 1: a token consists of letters, digits and . _ ~ + / = -"),
        (f"alice {ALICE}\nbob {ALICE}\n", "line 2: an earlier line has the same token"),
    ],
)
def test_a_file_that_is_no_list_of_tokens_is_refused_without_quoting_it(tmp_path, text, said):
    with pytest.raises(ValueError) as refused:
        AcceptedTokens(token_file(tmp_path / "accepted", text))
    assert str(refused.value).startswith("accept_tokens: ")
    assert str(refused.value).endswith(said)
    assert ALICE not in str(refused.value)


async def test_only_who_shows_a_known_token_is_answered(accepted, tmp_path):
    async with target_site(security=Security(tokens=AcceptedTokens(accepted))) as site:
        assert [await asked(site, t and shown(tmp_path, t)) for t in (ALICE, NEW, None)] == [
            WHAT_THE_TARGET_SAYS,
            "UNAUTHENTICATED: unknown token: it is wrong, or was revoked",
            "UNAUTHENTICATED: no token: this server requires one, as metadata `authorization: Bearer TOKEN`",
        ]


@pytest.mark.parametrize(
    "headers", [[f"Basic {ALICE}"], [ALICE], ["Bearer"], ["bearer "], [f"Bearer {ALICE}", f"Bearer {BOB}"]]
)
async def test_other_ways_to_authorize_and_two_tokens_at_once_are_none(accepted, headers):
    security = Security(tokens=AcceptedTokens(accepted))
    async with target_site(security=security) as site, open_channel(site.address) as channel:
        call = channel.unary_unary("/tandem.v1.TargetVerifier/GetModelInfo")
        with pytest.raises(Exception) as refused:
            await call(b"", metadata=tuple(("authorization", header) for header in headers))
    assert refused.value.code().name == "UNAUTHENTICATED"


def test_tokens_are_added_and_withdrawn_without_a_restart(accepted, tmp_path, caplog):
    async def test():
        said = []
        async with target_site(security=Security(tokens=AcceptedTokens(accepted))) as site:
            said.append(await asked(site, shown(tmp_path, NEW)))
            token_file(tmp_path / "accepted", f"alice {NEW}\n")
            said.append(await asked(site, shown(tmp_path, NEW)))
            said.append(await asked(site, shown(tmp_path, ALICE)))
        return [one if isinstance(one, tuple) else one.partition(":")[0] for one in said]

    with caplog.at_level(logging.INFO, "tandem.security"):
        assert run(test()) == ["UNAUTHENTICATED", WHAT_THE_TARGET_SAYS, "UNAUTHENTICATED"]
    assert "reloaded: " in caplog.text
    assert NEW not in caplog.text and ALICE not in caplog.text


@pytest.mark.parametrize("spoil", [lambda file: file.write_text("half a li"), lambda file: file.unlink()])
def test_a_file_that_was_spoiled_changes_nothing_and_is_said_once(accepted, tmp_path, caplog, spoil):
    tokens = AcceptedTokens(accepted)
    spoil(tmp_path / "accepted")
    assert [tokens.identity(ALICE), tokens.identity(ALICE)] == ["alice", "alice"]
    assert caplog.text.count("keeping the old one") == 1
    token_file(tmp_path / "accepted", f"carol {NEW}\n")
    assert [tokens.identity(ALICE), tokens.identity(NEW)] == [None, "carol"]


async def test_a_caller_sends_the_token_that_its_file_has_now(accepted, tmp_path):
    mine = shown(tmp_path, NEW)
    security = Security(tokens=AcceptedTokens(accepted))
    async with target_site(security=security) as site, site.client(mine) as client:
        with pytest.raises(TandemError):
            await client.model_info()
        token_file(tmp_path / "token", f"{ALICE}\n")
        found = (await client.model_info()).vocab_size > 0
    assert found


async def test_a_token_may_come_from_the_environment(accepted, monkeypatch):
    monkeypatch.setenv("TANDEM_TEST_TOKEN", BOB)
    async with target_site(security=Security(tokens=AcceptedTokens(accepted))) as site:
        assert await asked(site, Credentials(token_env="TANDEM_TEST_TOKEN")) == WHAT_THE_TARGET_SAYS


async def test_a_worker_whose_own_token_is_withdrawn_does_not_blame_its_caller(accepted, tmp_path):
    security, mine = Security(tokens=AcceptedTokens(accepted)), shown(tmp_path, ALICE)
    async with target_site(security=security) as target, worker_site(target.address, credentials=mine) as worker:
        token_file(tmp_path / "accepted", f"bob {BOB}\n")
        said = await asked(worker, None)
    assert said.startswith("INTERNAL: another server refused this server's call: UNAUTHENTICATED")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "has 0 lines; it holds one token"),
        (f"{ALICE}\n{BOB}\n", "has 2 lines; it holds one token"),
        (f"alice {ALICE}\n", "holds more than one token, or characters not allowed in a token"),
    ],
)
def test_a_callers_file_holds_one_token(tmp_path, text, said):
    with pytest.raises(ValueError) as refused:
        Credentials(token_file=token_file(tmp_path / "token", text))
    assert str(refused.value) == f"token_file: {tmp_path / 'token'} {said}"


def test_this_machine_is_loopback_and_nothing_else():
    assert all(map(on_this_machine, ("127.0.0.1", "127.9.8.7", "::1", "[::1]", "localhost")))
    assert not any(map(on_this_machine, ("0.0.0.0", "::", "localhost.example", "10.0.0.1", "")))
