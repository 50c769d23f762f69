"""Real processes: what is refused at start, what a secured fleet says, and what never gets into a log."""

from __future__ import annotations

import contextlib
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from tandem.cli import main
from tandem.services.statuses import to_status
from tests.daily import daily
from tests.services.certificates import Authority, token_file
from tests.support import REPOSITORY, ServerProcess, command, run_client, server_process

CANARY = "qzcanaryzq"
IDS = [str(byte) for byte in CANARY.encode()]


def refused(capsys, *arguments: str) -> tuple[int, list[str]]:
    return main.main(list(arguments)), capsys.readouterr().err.splitlines()


@pytest.mark.parametrize("role", ["target", "fused_target", "draft_worker"])
@pytest.mark.parametrize("host", ["0.0.0.0", "[::]", "10.1.2.3", "target.example"])
def test_no_server_listens_for_other_machines_in_clear_text(capsys, role, host):
    code, said = refused(capsys, "--role", role, "--backend", "toy", "--host", host, "--port", "0")
    assert code == 2
    assert said == [
        f"main.py: host: {host} can be reached from other machines, and there is no TLS: "
        "give --tls_cert and --tls_key, or pass --insecure"
    ]


def test_a_server_listens_for_other_machines_where_that_is_said_aloud(tmp_path):
    with server_process(tmp_path, "--role", "target", "--host", "0.0.0.0", "--insecure") as server:
        assert "WARNING tandem.security: access on 0.0.0.0: no TLS, no tokens" in server.log.read_text()
        assert server.stop() == 0


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--tls_key", "server.key"], "tls_key: given without tls_cert"),
        (["--tls-client-ca", "ca.pem"], "tls_client_ca: given without tls_cert and tls_key"),
        (["--tls_cert", "a.pem", "--tls_key", "a.key"], "tls_cert: a.pem: No such file or directory"),
        (["--accept_tokens", "absent"], "accept_tokens: absent: No such file or directory"),
        (["--max_sessions_per_identity", "0"], "max_sessions_per_identity: 0 is below 1"),
        (["--max_message_bytes", "1"], "max_message_bytes: 1 is below 1024"),
        (
            ["--token_env", "TANDEM_ABSENT"],
            "token_env: without --draft_host, --prefill or --settle no server is called",
        ),
    ],
)
def test_what_is_wrong_with_a_flag_is_said_in_one_line(capsys, flags, said):
    assert refused(capsys, "--role", "target", "--backend", "toy", *flags) == (2, [f"main.py: {said}"])


@pytest.mark.parametrize(
    ("role", "where"),
    [
        ("client", ["--prompt", "x", "--target_host", "10.1.2.3"]),
        ("draft", ["--backend", "toy", "--prompt", "x", "--target_host", "10.1.2.3"]),
        ("draft_worker", ["--backend", "toy", "--target_host", "10.1.2.3"]),
        ("target", ["--backend", "toy", "--draft_host", "10.1.2.3:50051"]),
    ],
)
def test_no_role_sends_its_token_to_other_machines_in_clear_text(capsys, monkeypatch, role, where):
    monkeypatch.setenv("TANDEM_TEST_TOKEN", "a-token-of-mine-0123")
    code, said = refused(capsys, "--role", role, "--token_env", "TANDEM_TEST_TOKEN", *where)
    assert code == 2
    assert said == [
        "main.py: token_env: the token would be sent to 10.1.2.3:50051 in clear text; give --tls_ca, or pass --insecure"
    ]


def test_a_fleet_with_tls_client_certificates_and_tokens_answers_only_its_own(tmp_path):
    """docs/security.md's example, with processes: target, worker, and a client of the worker."""
    authority = Authority(tmp_path / "certificates")
    tls = authority.server(mutual=True)
    accepted = token_file(tmp_path / "accepted", "worker a-token-of-the-worker\nalice a-token-of-alices-own\n")
    worker = authority.client("worker.example")
    serving = ("--tls_cert", tls.cert, "--tls_key", tls.key, "--tls_client_ca", str(tls.client_ca))
    calling = ("--tls_ca", worker.ca, "--tls_client_cert", worker.cert, "--tls_client_key", worker.key)
    own = token_file(tmp_path / "worker.token", "a-token-of-the-worker\n")
    mine = token_file(tmp_path / "alice.token", "a-token-of-alices-own\n")
    with contextlib.ExitStack() as stack:
        target = stack.enter_context(
            server_process(tmp_path, "--role", "target", *serving, "--accept_tokens", accepted, ready_file="t.json")
        )
        drafting = ("--role", "draft_worker", "--target_port", str(target.port), "--accept_tokens", accepted)
        worked = stack.enter_context(
            server_process(tmp_path, *drafting, *serving, *calling, "--token_file", own, ready_file="w.json")
        )
        asking = ("--port", str(worked.port), "--prompt", "hello", "--max_new_tokens", "8")
        said = run_client(tmp_path, *asking, *calling, "--token_file", mine)
        without = run_client(tmp_path, *asking, *calling)
    assert said.returncode == 0, said.stderr
    assert "8 tokens in" in said.stderr
    assert without.returncode == 1
    assert "UNAUTHENTICATED" in without.stderr
    assert "access on 127.0.0.1: TLS with client certificates, tokens" in target.log.read_text()


# --- what gets into logs ---

ROLES = {
    "target": ("--role", "target"),
    "fused_target": ("--role", "fused_target"),
    "draft_worker": ("--role", "draft_worker"),
    "remote_draft": ("--role", "target", "--draft_host"),
}


def _logs_after_a_canary(folder: Path, *flags: str, roles: Sequence[str] = tuple(ROLES)) -> dict[str, str]:
    """Starts servers of `roles` at --debug, sends them the canary in good and refused requests, returns their logs."""
    with contextlib.ExitStack() as stack:

        def started(name: str, *arguments: str) -> ServerProcess:
            return stack.enter_context(server_process(folder, *arguments, "--debug", *flags, ready_file=f"{name}.json"))

        target = started("target", *ROLES["target"])
        worker = started("draft_worker", *ROLES["draft_worker"], "--target_port", str(target.port))
        servers = [target, worker]
        if "fused_target" in roles:
            servers.append(started("fused_target", *ROLES["fused_target"]))
        if "remote_draft" in roles:
            servers.append(started("remote_draft", *ROLES["remote_draft"], f"127.0.0.1:{worker.port}"))
        for server in servers:
            asking = ("--port", str(server.port), "--prompt", CANARY)
            assert run_client(folder, *asking, "--max_new_tokens", "6").returncode == 0
            assert run_client(folder, *asking, "--max_new_tokens", "6000").returncode == 1
            assert run_client(folder, *asking, "--stop", CANARY, "--temperature", "0.5").returncode == 0
        for server in reversed(servers):
            assert server.stop() == 0
        return {server.ready_file.stem: server.log.read_text() for server in servers}


def _ids_in(log: str) -> bool:
    return re.search(r"\D+".join(IDS[:4]), log) is not None


@pytest.mark.parametrize("roles", daily([["target", "draft_worker"], [*ROLES]], 0), ids=["two", "all"])
def test_no_server_logs_prompts_or_their_ids_at_debug(tmp_path, roles):
    logs = _logs_after_a_canary(tmp_path, roles=roles)
    assert set(logs) == set(roles)
    for name, log in logs.items():
        assert "is ready on" in log and "DEBUG" in log, f"{name} logs at --debug"
        assert CANARY not in log and not _ids_in(log), f"{name}: {log}"


@pytest.mark.thorough
def test_with_log_prompts_every_server_logs_them_and_says_so(tmp_path):
    for name, log in _logs_after_a_canary(tmp_path, "--log_prompts").items():
        assert CANARY in log, name
        assert "prompts are logged" in log
        assert "Generate of anonymous asked" in log and "Generate of anonymous answered" in log
        if name in ("target", "draft_worker"):
            assert _ids_in(log), f"{name}: rounds and proposals carry ids"


def test_an_unexpected_error_is_logged_by_its_place_and_not_by_what_it_says(caplog):
    def fail() -> None:
        raise RuntimeError(f"cannot tokenize {CANARY!r}")

    def status(log_prompts: bool) -> str:
        try:
            fail()
        except RuntimeError as error:
            return to_status(error, log_prompts).message
        return ""

    assert status(False) == "internal error: RuntimeError"
    assert "RuntimeError at" in caplog.text and "in fail" in caplog.text
    assert CANARY not in caplog.text.replace(f"{{{CANARY!r}}}", "")
    assert status(True) == "internal error: RuntimeError", "and nobody else is told in any case"
    assert f"cannot tokenize '{CANARY}'" in caplog.text


@pytest.mark.thorough
def test_compare_architectures_shows_connected_servers_what_they_ask_for(tmp_path):
    authority = Authority(tmp_path / "certificates")
    tls = authority.server()
    accepted = token_file(tmp_path / "accepted", "bench a-token-for-comparing\n")
    serving = ("--tls_cert", tls.cert, "--tls_key", tls.key, "--accept_tokens", accepted)
    token = token_file(tmp_path / "bench.token", "a-token-for-comparing\n")
    with server_process(tmp_path, "--role", "target", *serving) as target:
        ran = subprocess.run(
            [
                command()[0],
                str(REPOSITORY / "compare_architectures.py"),
                *("--backend", "toy", "--prompt", "hello", "--max-new-tokens", "4", "--num-runs", "1"),
                *("--architectures", "autoregressive,distributed", "--output-dir", str(tmp_path / "results")),
                *("--connect", f"autoregressive=127.0.0.1:{target.port}"),
                *("--tls-ca", str(authority.ca), "--token-file", token),
            ],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=90,
            check=False,
        )
    assert ran.returncode == 0, ran.stderr
    assert "distributed" in ran.stdout
    written = (tmp_path / "results" / "comparison.json").read_text()
    assert "a-token-for-comparing" not in written and token not in written
