"""A proxy that the environment names is told nothing in clear text; through TLS it may be asked."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem.rpc.channel import TARGET
from tandem.rpc.credentials import Credentials, Reread, warn_if_others_read
from tandem.rpc.received_errors import TandemError
from tandem.services.security.access import Security
from tandem.services.security.callers import AcceptedTokens
from tests.services.certificates import Authority, token_file
from tests.support import GREEDY, answer, ids, oracle, target_site

PROMPT = b"past the proxy"
TOKEN = "a-token-for-this-machine"


class FakeProxy:
    """Notes what it is told, and hangs up."""

    def __init__(self) -> None:
        self.told: list[bytes] = []
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()

    def _listen(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            with connection:
                self.told.append(connection.recv(65536))

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join()


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeProxy]:
    fake = FakeProxy()
    for name in ("no_grpc_proxy", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, fake.url)
    yield fake
    fake.close()


async def test_in_clear_text_no_proxy_is_told_anything(proxy: FakeProxy, tmp_path: Path) -> None:
    accepted = AcceptedTokens(token_file(tmp_path / "accepted", f"alice {TOKEN}\n"))
    mine = Credentials(token_file=token_file(tmp_path / "alice", TOKEN))
    async with target_site(security=Security(tokens=accepted)) as site, site.client(mine) as client:
        assert (await answer(lambda r: client.generate(r, timeout=20.0), ids(PROMPT, 8))).token_ids == oracle(
            PROMPT, GREEDY, 8
        )
    assert proxy.told == []


async def test_through_tls_a_proxy_is_asked_for_the_way_and_sees_no_token(proxy: FakeProxy, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    accepted = AcceptedTokens(token_file(tmp_path / "accepted", f"alice {TOKEN}\n"))
    mine = Credentials(ca=str(authority.ca), token_file=token_file(tmp_path / "alice", TOKEN))
    security = Security(tls=authority.server(), tokens=accepted)
    async with target_site(security=security) as site, site.client(mine) as client:
        with pytest.raises(TandemError, match=r"UNAVAILABLE|DEADLINE"):
            await answer(lambda r: client.generate(r, timeout=2.0), ids(PROMPT, 8))
    assert proxy.told and all(each.startswith(b"CONNECT ") for each in proxy.told)
    assert not any(TOKEN.encode() in each for each in proxy.told)
    assert TARGET not in b"".join(proxy.told).decode("latin-1")


def test_a_group_that_may_read_is_warned_about(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "tokens"
    file.touch()
    for mode, warnings in ((0o600, 0), (0o640, 1), (0o604, 2), (0o620, 2)):
        file.chmod(mode)
        warn_if_others_read("tokens", str(file))
        assert len(caplog.records) == warnings, oct(mode)
    assert "mode 640" in caplog.messages[0] and "tokens: " in caplog.messages[0]


def test_a_rewrite_of_the_same_length_is_a_change(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text("alice one")
    os.utime(path, ns=(0, 1))
    token = Reread(path.read_text, str(path))
    path.write_text("alice two")
    os.utime(path, ns=(0, 2))
    assert token.current() == "alice two"
