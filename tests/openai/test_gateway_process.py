"""The life of the gateway: what it starts ends with it, however it ends, and what it cannot do it says in one line."""

from __future__ import annotations

import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tandem.cli import main
from tandem.cli.option import built
from tandem.workshops.gateway import config as gateway_config
from tandem.workshops.gateway.config import GatewayConfig
from tests.openai.gateway import CHAT, Gateway, children, gateway, running, start, wait_ready, worker
from tests.services.certificates import Authority, token_file
from tests.support import HANG, ServerProcess, launch, server_process

pytestmark = pytest.mark.thorough


@pytest.fixture
def toy(tmp_path: Path) -> Iterator[tuple[str, str]]:
    with worker(tmp_path, "--model", "step=0.005") as flags:
        yield flags


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[tuple[str, str]]:
    with worker(tmp_path, "--model", "step=0.05") as flags:
        yield flags


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_gateway(number: signal.Signals, toy: tuple[str, str], tmp_path: Path) -> None:
    process = start(tmp_path, *toy)
    gate = wait_ready(process, tmp_path)
    (smg,) = children(process.pid)
    began = time.monotonic()
    process.send_signal(number)
    told, _ = process.communicate(timeout=HANG)
    assert process.returncode == 0, gate.log.read_text()
    assert time.monotonic() - began < 2.0 and "gateway: stopping\n" in gate.log.read_text()
    assert not running(smg)
    base, curl = told.splitlines()
    assert base == f"OpenAI clients: base URL {gate.url}, model toy"
    assert curl.startswith(f"curl {gate.url}/chat/completions ")


def test_a_signal_while_it_starts_ends_it_too(toy: tuple[str, str], tmp_path: Path) -> None:
    process = start(tmp_path, *toy)
    give_up = time.monotonic() + HANG
    while not (parts := children(process.pid)):
        assert process.poll() is None and time.monotonic() < give_up
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=HANG)
    assert process.returncode == 0 and not any(running(pid) for pid in parts)


def interrupted(process: subprocess.Popen[str], gate: Gateway) -> str:
    """Sends Ctrl-C; returns what the gateway says at once."""
    process.send_signal(signal.SIGINT)
    give_up = time.monotonic() + 2.0
    while not (said := [line for line in gate.log.read_text().splitlines() if line.startswith("gateway: ")]):
        assert time.monotonic() < give_up
        time.sleep(0.01)
    return said[-1]


WAITS = "gateway: stopping: waits up to {} s for {} running request{}; Ctrl-C, or another signal, ends it at once"


def test_it_waits_for_requests_and_says_so(slow: tuple[str, str], tmp_path: Path) -> None:
    process = start(tmp_path, *slow)
    gate = wait_ready(process, tmp_path)
    streams = [gate.begin(max_tokens=40), gate.begin(max_tokens=40)]
    assert interrupted(process, gate) == WAITS.format(30, 2, "s")
    for stream in streams:
        rest = stream.rest()
        assert rest.rstrip().endswith("[DONE]") and '"finish_reason":"length"' in rest
    process.communicate(timeout=HANG)
    assert process.returncode == 0


def test_a_stream_that_is_not_done_in_time_ends_with_an_error_event(slow: tuple[str, str], tmp_path: Path) -> None:
    process = start(tmp_path, *slow, "--drain_seconds", "1")
    gate = wait_ready(process, tmp_path)
    stream, began = gate.begin(max_tokens=400), time.monotonic()
    assert interrupted(process, gate) == WAITS.format(1, 1, "")
    events = [json.loads(line[6:]) for line in stream.rest().splitlines() if line.startswith("data: {")]
    assert [event["error"]["type"] for event in events if "error" in event] == ["server_error"]
    assert "error" in events[-1] and "choices" in events[-2]
    process.communicate(timeout=HANG)
    assert process.returncode == 0 and time.monotonic() - began < 5.0


def test_a_second_signal_ends_it_at_once(slow: tuple[str, str], tmp_path: Path) -> None:
    process = start(tmp_path, *slow)
    gate = wait_ready(process, tmp_path)
    parts, stream = children(process.pid), gate.begin(max_tokens=400)
    interrupted(process, gate)
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=HANG)
    assert time.monotonic() - began < 1.0 and not any(running(pid) for pid in parts)
    assert process.returncode == 1
    assert gate.log.read_text().splitlines()[-1] == "gateway: ended at once, by a second signal"
    stream.leave()


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's signal to children")
@pytest.mark.parametrize("ready", [True, False])
def test_a_gateway_that_is_killed_takes_smg_with_it(ready: bool, slow: tuple[str, str], tmp_path: Path) -> None:
    process = start(tmp_path, *slow)
    give_up = time.monotonic() + HANG
    stream = wait_ready(process, tmp_path).begin(max_tokens=400) if ready else None
    while not (parts := children(process.pid)):
        assert process.poll() is None and time.monotonic() < give_up
        time.sleep(0.01)
    process.kill()
    process.communicate()
    while any(running(pid) for pid in parts):
        assert time.monotonic() < give_up
        time.sleep(0.01)
    if stream:
        stream.leave()


def test_when_smg_dies_the_gateway_ends_and_says_so(toy: tuple[str, str], tmp_path: Path) -> None:
    process = start(tmp_path, *toy)
    gate = wait_ready(process, tmp_path)
    (smg,) = children(process.pid)
    os.kill(smg, signal.SIGKILL)
    process.communicate(timeout=HANG)
    assert process.returncode == 1 and "gateway: smg was killed by signal 9" in gate.log.read_text()


def test_a_port_that_is_taken_is_said_before_anything_starts(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = launch(tmp_path, "--role", "gateway", "--http_port", str(port), "--workers", "h:1")
    assert result.returncode == 2
    assert result.stderr == f"main.py: http_port: cannot listen on 127.0.0.1:{port}; is another server there?\n"


def test_workers_that_do_not_answer_are_named_each_with_its_reason_while_it_waits_for_them(tmp_path: Path) -> None:
    with server_process(tmp_path, "--role", "target", "--http_port", "0", ready_file="t.json") as server:
        grpc = server.wait_ready()
        http = f"127.0.0.1:{json.loads(server.ready_file.read_text())['http_port']}"
        check_waiting(
            tmp_path,
            ("127.0.0.1:9", "nothing listens at 127.0.0.1:9 (connection refused): start the server"),
            ("no-such-machine.invalid:1", "no machine has the name 'no-such-machine.invalid'"),
            (grpc, f"{grpc} is no engine port: name the one that its server has by --engine_port"),
            (http, f"{http} is an HTTP port: name the one that its server has by --engine_port"),
        )


def check_waiting(folder: Path, *workers: tuple[str, str]) -> None:
    process = start(folder, "--workers", ",".join(address for address, _ in workers))
    log, give_up = folder / "gateway.log", time.monotonic() + HANG
    try:
        while not all(f"gateway: waits for a server: {said}" in log.read_text() for _, said in workers):
            assert process.poll() is None and time.monotonic() < give_up, log.read_text()
            time.sleep(0.02)
    finally:
        process.terminate()
        process.communicate(timeout=HANG)
    assert process.returncode == 0


def configured(**given: object) -> GatewayConfig:
    options = main.parser().parse_args(["--role", "gateway"])
    return built(GatewayConfig, options, **{"workers": ("h:1",), "port": 0, "flags": "", **given})


@pytest.mark.parametrize("library", ["smg", "smg_grpc_proto"])
def test_a_missing_gateway_is_named_with_what_to_install(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_config.importlib.util, "find_spec", lambda name: None if name == library else name)
    with pytest.raises(ValueError, match=rf"gateway: {library} is not installed; make setup"):
        configured()


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"workers": ()}, "workers: give --workers HOST:PORT"),
        ({"workers": ("nowhere",)}, "workers: 'nowhere' is not HOST:PORT"),
        ({"port": 65536}, "http_port: 65536 is outside 0 to 65535"),
        ({"queue": -1}, "queue: -1 is below 0"),
        ({"host": "0.0.0.0"}, "host: 0.0.0.0 can be reached from other machines"),
        ({"tls_cert": "a"}, "tls_cert: give --tls_cert and --tls_key together"),
    ],
)
def test_a_wrong_configuration_is_refused_with_the_flag(wrong: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        configured(**wrong)


def test_api_keys_come_from_a_file_and_no_command_line_shows_them(toy: tuple[str, str], tmp_path: Path) -> None:
    token = "a-token-of-mine-0123"
    keys = token_file(tmp_path / "keys", f"me {token}\n")
    with gateway(tmp_path, *toy, "--accept_tokens", str(keys)) as gate:
        assert gate.post(max_tokens=1).status == 401
        with openai.OpenAI(base_url=gate.url, api_key=token, max_retries=0, timeout=HANG) as client:
            answer = client.completions.create(model="toy", prompt="a", max_tokens=1)
        assert answer.usage and answer.usage.completion_tokens == 1
        for pid in children(gate.process.pid):
            assert token not in Path(f"/proc/{pid}/cmdline").read_text()


def test_a_gateway_whose_certificate_an_authority_signed_for_another_name_is_ready(
    toy: tuple[str, str], tmp_path: Path
) -> None:
    """As in a cluster. It waited for ever, because it trusted no authority but its own certificate."""
    authority = Authority(tmp_path / "tls")
    pair = authority.issue("openai.tandem.svc")
    with gateway(tmp_path, *toy, "--tls_cert", str(pair.cert), "--tls_key", str(pair.key)) as gate:
        trusting = ssl.create_default_context(cafile=str(authority.ca))
        plain = socket.create_connection(("127.0.0.1", gate.port), timeout=HANG)
        with plain, trusting.wrap_socket(plain, server_hostname="openai.tandem.svc") as secure:
            secure.sendall(b"GET /v1/models HTTP/1.1\r\nHost: openai.tandem.svc\r\nConnection: close\r\n\r\n")
            assert secure.recv(12) == b"HTTP/1.1 200"


def test_hashed_tokens_are_refused_since_smg_needs_them_plain(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="lines `identity token`, without hashes"):
        configured(accept_tokens=str(token_file(tmp_path / "keys", f"me sha256:{'0' * 64}\n")))


@pytest.fixture
def two_servers(tmp_path: Path) -> Iterator[list[ServerProcess]]:
    flags = ("--role", "target", "--engine_port", "0", "--batch", "2", "--sequence_length", "200")
    with (
        server_process(tmp_path, *flags, ready_file="a.json") as first,
        server_process(tmp_path, *flags, ready_file="b.json") as second,
    ):
        yield [first, second]


def test_work_is_spread_over_workers_a_key_stays_on_one_and_a_dead_one_is_left_out(
    two_servers: list[ServerProcess], tmp_path: Path
) -> None:
    ports = [json.loads(server.ready_file.read_text())["engine_port"] for server in two_servers]
    with gateway(tmp_path, "--workers", ",".join(f"127.0.0.1:{port}" for port in ports), "--queue", "0") as gate:

        def answered_by(**more: str) -> str:
            reply = gate.post(CHAT, max_tokens=2, seed=1, **more)
            assert reply.status == 200, reply
            return reply.headers["x-smg-routed-worker-id"]

        give_up, seen = time.monotonic() + HANG, set[str]()
        while len(seen) < 2:  # the second may register later
            assert time.monotonic() < give_up
            seen.add(answered_by())
        for key in ("one", "two", "three"):
            assert len({answered_by(key=key) for _ in range(4)}) == 1
        texts = {gate.post(CHAT, max_tokens=12, seed=4).text for _ in range(6)}
        assert len(texts) == 1  # whichever answers
        two_servers[0].process.kill()
        two_servers[0].process.wait()
        assert {answered_by() for _ in range(4)} == {f"grpc://127.0.0.1:{ports[1]}"}


def test_the_package_s_own_command_reads_its_arguments_from_standard_input() -> None:
    from tandem.workshops.gateway.run import SMG

    given = json.dumps(["launch", "--help"]).encode()
    result = subprocess.run([sys.executable, *SMG[1:]], input=given, capture_output=True, timeout=HANG)
    assert result.returncode == 0 and b"--worker-urls" in result.stdout
