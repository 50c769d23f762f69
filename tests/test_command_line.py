"""Every role x every flag: either the table lists it and it reaches the role's configuration, or it is refused."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from tandem.cli import asking, configuration, main, models, tools
from tandem.cli.command_line import RoleParser
from tandem.cli.flags import FLAGS, Options
from tandem.cli.roles import BACKENDS, LOADING, ROLES, SERVERS
from tandem.clients.prefill_client import PrefillConfig
from tandem.clients.terminal import ClientConfig
from tandem.engine.model_config import ModelConfig
from tandem.engine.prefix_cache import PrefixSharing
from tandem.runners.load_runner import Execution, Shape
from tandem.speculation.types import SAMPLING_FIELDS, GenerationRequest
from tandem.workshops.planning.plan import PlanConfig
from tandem_nxdi.nxdi_settings import NxdiSettings
from tests.services.certificates import Authority, token_file

VALUES = {
    "adapters": "red=folder",
    "draft_adapters": "red=folder",
    "speculation_length": "4",
    "max_speculation_length": "6",
    "tp_degree": "2",
    "cores": "0-1",
    "compile_for": "target",
    "batch_buckets": "1,2",
    "draft_buckets": "1,2",
    "neuron_config": '{"fused_qkv": true}',
    "draft_neuron_config": '{"fused_qkv": true}',
    "host": "127.0.0.2",
    "http_host": "127.0.0.2",
    "draft_host": "127.0.0.1:9",
    "prefill": "127.0.0.1:9",
    "tls_cert": "server.pem",
    "tls_key": "server.key",
    "tls_client_ca": "ca.pem",
    "accept_tokens": "accepted",
    "tls_ca": "ca.pem",
    "tls_client_cert": "server.pem",
    "tls_client_key": "server.key",
    "token_file": "token",
    "token_env": "TANDEM_TEST_TOKEN",
    "prompt_text": "prompt.txt",
    "top_p": "0.5",
    "min_p": "0.5",
    "report": "other.json",
    "margin": "0.25",
}
# What a flag needs beside it to have an effect.
WITH = {
    "metrics_host": ["--metrics_port", "7"],
    "http_host": ["--http_port", "0"],
    "allowed_hosts": ["--http_port", "0"],
    "draft_seconds": ["--draft_host", "127.0.0.1:9"],
    "prefill_min_tokens": ["--prefill", "127.0.0.1:9"],
    "prefill_timeout_s": ["--prefill", "127.0.0.1:9"],
    "modules_to_not_convert": ["--quantization", "int8"],
    "tls_cert": ["--tls_key", "server.key"],
    "tls_key": ["--tls_cert", "server.pem"],
    "tls_client_ca": ["--tls_cert", "server.pem", "--tls_key", "server.key"],
    "tls_client_cert": ["--tls_ca", "ca.pem", "--tls_client_key", "server.key"],
    "tls_client_key": ["--tls_ca", "ca.pem", "--tls_client_cert", "server.pem"],
    "tls_server_name": ["--tls_ca", "ca.pem"],
}
NEEDED = {
    **{role: ["--prompt", "a"] for role in ("client", "fused_client", "draft", "verify_target", "verify_draft")},
    "check": ["--receipt", "receipt.json", "--prompt", "prompt.txt"],
    "plan": ["--instance", "trn2.48xlarge"],
    "advise": ["--report", "comparison.json"],
    "convert": ["--convert", "fp8", "--model", "m", "--output", "o"],
}
CALLS = ("tls_ca", "tls_client_cert", "tls_client_key", "tls_server_name", "token_file", "token_env")
ELSEWHERE = ("log_format", "debug")  # read by main itself, for every role


def backends_of(role: str) -> tuple[str, ...]:
    if role not in (*LOADING, "plan"):
        return ("torch",)
    if role == "compile":
        return ("torch", "nxdi")
    return ("torch", "nxdi") if role == "plan" else BACKENDS


def lists(role: str, backend: str, name: str) -> bool:
    return role in (FLAGS[name].takers(backend) if role in (*LOADING, "plan") else FLAGS[name].roles)


CASES = [(role, backend) for role in ROLES for backend in backends_of(role)]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TANDEM_TEST_TOKEN", "a-token-of-mine-0123")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    (tmp_path / "prompt.txt").write_text("another\n")
    for folder in ("m", "other"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.json").write_text("{}")
    token_file(tmp_path / "accepted", "me a-token-of-mine-0123\n")
    token_file(tmp_path / "token", "a-token-of-mine-0123\n")
    Authority(tmp_path).issue("server")  # ca.pem, server.pem, server.key
    return tmp_path


def words(role: str, backend: str, name: str | None = None) -> list[str]:
    told = [f"--backend={backend}"] if role in (*LOADING, "plan") and backend != "torch" else []
    told += NEEDED.get(role, [])
    if role == "plan" and name not in ("model", "target_model"):
        told += ["--target_model", "t"]
    if role == "convert" and name in ("target_model", "draft_model"):
        told = ["--convert", "eagle", "--draft_model", "m", "--output", "o"]
    if name is None:
        return ["--role", role, *told]
    flag = FLAGS[name]
    told += WITH.get(name, [])
    if role == "target" and name in CALLS:
        told += ["--draft_host", "127.0.0.1:9"]
    if role == "fused_target" and name in CALLS and backend != "nxdi":
        told += ["--prefill", "127.0.0.1:9"]
    if "action" in flag.options and flag.options["action"] == "store_true":
        return ["--role", role, *told, f"--{name}"]
    last = (flag.metavar or "").rpartition("|")[2] if "|" in (flag.metavar or "") else None
    value = VALUES.get(name) or last or {int: "7", float: "0.5"}.get(flag.options.get("type", str), "other")
    return ["--role", role, *told, f"--{name}", value]


def configured(line: list[str], made: RoleParser) -> str:
    """What the role would be started with, or why it cannot be: either shows that the flag was read."""
    try:
        args = made.parse_args(line)
        run: Coroutine[Any, Any, Any] = main.start(args)
    except (ValueError, SystemExit) as error:
        return f"{type(error).__name__}: {error}"
    found = inspect.getcoroutinelocals(run)
    run.close()
    return "; ".join(f"{name}={plainly(value)}" for name, value in sorted(found.items()))


def plainly(value: object) -> str:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = (field.name for field in dataclasses.fields(value))
        return f"{{{', '.join(f'{name}: {plainly(getattr(value, name))}' for name in fields if name != 'command')}}}"
    if isinstance(value, frozenset):
        return str(sorted(value))
    text = repr(value)
    return type(value).__name__ if " at 0x" in text else text


@pytest.fixture(scope="module")
def made() -> RoleParser:
    return RoleParser()


@pytest.mark.each_value
@pytest.mark.parametrize(("role", "backend"), CASES)
def test_a_flag_that_is_listed_is_read_and_any_other_is_refused_in_one_line(
    role: str,
    backend: str,
    here: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    made: RoleParser,
) -> None:
    monkeypatch.setattr(main, "RoleParser", lambda program="": made)  # to build one for each line took most of the time
    once = functools.cache(lambda *line: configured([*line], made))  # most lines are the same without their flag
    for name in FLAGS:
        if name == "backend":  # which the cases are told apart by
            continue
        line = words(role, backend, name)
        if lists(role, backend, name):
            made.parse_args(line)
            read = configured(line, made) != once(*without(line, name))
            assert name in ELSEWHERE or read, f"{role}, {backend}: --{name} is not read"
            continue
        capsys.readouterr()
        assert main.main(line) == 2, line
        (said,) = capsys.readouterr().err.splitlines()
        takers = FLAGS[name].roles if role not in FLAGS[name].roles else ()
        assert f"--role {role} " in said and "does not take it" in said, said
        assert said.split(":")[1].strip() in (name, *dependent(name)), said
        assert all(taker in said for taker in takers if said.split(":")[1].strip() == name), said


def dependent(name: str) -> list[str]:
    """Flags that were given beside it, of which the first in the table is named."""
    return [word.removeprefix("--") for word in WITH.get(name, []) if word.startswith("--")]


def without(line: list[str], name: str) -> list[str]:
    """The line less the flag, which comes last."""
    at = len(line) - 1 - line[::-1].index(f"--{name}")
    return line[:at]


@pytest.mark.parametrize("role", list(ROLES))
def test_help_with_a_role_shows_that_roles_flags_alone(role: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        RoleParser().parse_args(["--role", role, "--help"])
    assert ended.value.code == 0
    shown = {word.strip(",") for line in capsys.readouterr().out.splitlines() for word in line.split()[:1]}
    for name, flag in FLAGS.items():
        assert (f"--{name}" in shown) == (role in flag.roles), name


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--role target --prompt x", "prompt: --role target does not take it; these do: client, fused_client, draft"),
        ("--role target --top-p 0", "top_p: 0.0 is outside (0, 1]"),
        ("--role client --prompt x --cores 0", "cores: --role client does not take it; these do: target,"),
        ("--role target --backend nxdi --threads 3", "with --backend nxdi does not take it; --backend torch does"),
        ("--role draft_worker --propose_only --top_p 0.5", "top_p: --propose_only has no target"),
        ("--role target --token_file f", "token_file: without --draft_host, --prefill or --settle no server is called"),
        ("--role target --prefill_min_tokens 64", "prefill_min_tokens: without --prefill no server is called"),
        ("--role target --prefill here", "prefill: 'here' is not HOST:PORT"),
        ("--role target --model a --target_model b", "target_model: the same as --model here"),
        ("--role client --prompt x --target_host h:1 --port 2", "port: --target_host already has the port"),
        ("--role target --max_new_tokens 0", "max_new_tokens: 0 is below 1"),
        ("--role target --modle x", "unrecognized arguments: --modle x; did you mean --model?"),
        ("target --max-tokens=3 --x", "unrecognized arguments: --max-tokens=3 --x; did you mean --max_new_tokens?"),
        ("compare --promt-file x", "unrecognized arguments: --promt-file x; did you mean --prompt-file?"),
        ("compare --prompt x --architectures fusd", "distributed_head, openai; did you mean fused?"),
        ("--role nobody", "argument --role: invalid choice: 'nobody' (choose from target, "),
        ("targt --port 3", "argument --role: invalid choice: 'targt'; did you mean target? (choose"),
        (
            "target --dtype flot32",
            "dtype: 'flot32' is not one of auto, float32, bfloat16, float16; did you mean float32?",
        ),
        ("plan --instance trn2.48xlarg --model m", "; did you mean trn2.48xlarge?"),
        ("convert --convert fp8 --output o --batch 2", "batch: --role convert does not take it; these do: "),
        ("target --http_host ::1", "http_host: give --http_port as well"),
        ("serve --http_host 0.0.0.0", "http_host: 0.0.0.0 can be reached from other machines, and there is no TLS"),
    ],
)
def test_a_flag_without_effect_is_one_line(line: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main.main(line.split())
    except SystemExit as ended:
        code = int(str(ended.code))
    (shown,) = capsys.readouterr().err.splitlines()
    assert code == 2 and shown.startswith(("main.py: ", "compare_architectures.py: ")) and said in shown


def test_without_a_role_the_roles_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    for line in ("", "--port 3"):
        with pytest.raises(SystemExit) as ended:
            main.main(line.split(), program="tandem")
        shown = capsys.readouterr()
        assert ended.value.code == 2 and shown.out == ""
        assert shown.err.startswith("usage: tandem ROLE [flags]\n") and "--port" not in shown.err
        assert all(f"\n  {role} " in shown.err for role in (*ROLES, "serve", "compare"))


@pytest.mark.parametrize(
    ("line", "model", "port"),
    [
        ("serve", None, 8080),
        ("serve --http_port 1", None, 1),
        ("serve DIR --batch=3", "DIR", 8080),
        ("--role serve DIR", "DIR", 8080),
        ("serve DIR --role target", "DIR", 8080),
    ],
)
def test_serve_is_a_server_with_http_at_port_8080(line: str, model: str | None, port: int) -> None:
    args = RoleParser().parse_args(main.with_role(line.split()))
    assert (args.role, args.model) == ("target" if "--role target" in line else "fused_target", model)
    assert (args.http_port, args.port, args.http_host) == (port, 0, "127.0.0.1")


@pytest.mark.parametrize("role", SERVERS)
def test_request_flags_of_a_server_are_its_defaults(role: str) -> None:
    args = RoleParser().parse_args(f"--role {role} --backend toy --temperature 0.9 --max-new-tokens 5".split())
    defaults = configuration.role_config(args, None).defaults
    assert (defaults.sampling.temperature, defaults.sampling.top_p, defaults.max_new_tokens) == (0.9, 1.0, 5)


def test_a_client_leaves_to_the_server_what_its_user_does_not_say() -> None:
    line = "--role client --prompt x --temperature 0 --top_p 1"
    args = RoleParser().parse_args(line.split())
    request = asking.client_config(args).request
    assert request.unset_sampling == {"top_k", "min_p", "seed", "repetition_penalty"} and request.sampling.greedy


def test_an_option_that_is_not_given_has_the_default_of_the_configuration(here: Path) -> None:
    def options(line: str) -> Options:
        return RoleParser().parse_args(line.split())

    target = options("--role target --prefill h:1")
    assert models.model_config(target, None) == ModelConfig(execution=Execution(recertify=False), default_k=None)
    assert configuration.role_config(target, None).prefill == PrefillConfig("h:1")
    assert configuration.role_config(target, None).prefixes == PrefixSharing()
    nxdi = models.nxdi_settings(options("--role fused_target --backend nxdi"), Shape())
    assert nxdi == NxdiSettings()
    with pytest.raises(ValueError, match=r"neuron_config: is_prefix_caching.* cannot be used here"):
        refused = options('--role fused_target --backend nxdi --neuron_config {"is_prefix_caching":true}')
        models.nxdi_settings(refused, Shape())
    assert tools.plan_config(options("--role plan --instance i --model m")) == PlanConfig("i", "m")
    asked = asking.client_config(options("--role client --prompt x"))
    unset = frozenset(SAMPLING_FIELDS)
    assert asked == ClientConfig("127.0.0.1:50051", ("x",), GenerationRequest(text="", unset_sampling=unset))
