"""The script of the first hour: taken end to end, resumed, refused; its commands for devices, its page, its bundle."""

from __future__ import annotations

import io
import json
import shlex
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from types import ModuleType

import pytest

from tandem.cli import compare
from tandem.cli.command_line import RoleParser
from tests.pages import checks
from tests.pages.commands import Command

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "deploy/first-hour"
SCRIPT = "deploy/first-hour/first_hour.py"


@pytest.fixture(name="script")
def the_script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    import first_hour  # type: ignore[import-not-found]

    return first_hour


@pytest.mark.thorough
def test_the_first_hour_is_taken_here_to_a_bundle(tmp_path: Path) -> None:
    command = [sys.executable, SCRIPT, "toy", "--folder", str(tmp_path / "hour")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    with tarfile.open(tmp_path / "hour.tar.gz") as bundle:
        names = set(bundle.getnames())
    assert names >= {"about.json", "measured/records.jsonl", "measured/comparison.json", "versions.log", "doctor.log"}
    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert again.stdout.count("done before") == 4 and "[measure] python" not in again.stdout
    assert "every answer has plain decoding's tokens" in (tmp_path / "hour" / "probe.log").read_text(encoding="utf-8")


def figures(**counts: tuple[int, int] | None) -> str:
    """What the probe reads of a comparison.json: of so many answers, how many are plain decoding's."""
    same = {name: of and dict(zip(("count", "total"), of, strict=True)) for name, of in counts.items()}
    shown = [{"architecture": name, "identical": one} for name, one in same.items()]
    return json.dumps({"conditions": [{"name": "base", "varies": "base", "summaries": shown}]})


@pytest.mark.parametrize(
    ("written", "code", "said"),
    [
        (figures(autoregressive=None, fused=(4, 4)), 0, "every answer has plain decoding's tokens"),
        (figures(fused=(4, 4), distributed=(3, 4)), 1, "base, distributed: 3 of 4 answers are plain decoding's"),
        (figures(autoregressive=(4, 4)), 1, "no answer was compared"),
        ('{"conditions": [1]}', 2, "is not the result of a comparison"),
        (None, 2, "is not the result of a comparison"),
    ],
)
def test_the_probe_fails_on_other_tokens(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], written: str | None, code: int, said: str
) -> None:
    if written is not None:
        (tmp_path / "comparison.json").write_text(written, "utf-8")
    assert script.main(["same", str(tmp_path)]) == code
    assert said in "".join(capsys.readouterr())
    *_, (_, *words) = commands_of_probe(script, tmp_path)
    assert words == ["deploy/first-hour/first_hour.py", "same", f"{tmp_path}/probe"]


def commands_of_probe(script: ModuleType, folder: Path) -> tuple[tuple[str, ...], ...]:
    steps = script.PLANS["cpu"](Path("/models")).steps(folder)
    return next(step.commands for step in steps if step.name == "probe")  # type: ignore[no-any-return]


def of_steps(script: ModuleType, plan: str, **commands: str) -> object:
    """A plan whose steps are Python programs."""
    from plans import PLANS, HourPlan, Step  # type: ignore[import-not-found]

    steps = [Step(name, (("python", "-c", program),), 1, 5, f"mend {name}") for name, program in commands.items()]
    base = PLANS[plan](Path("/models"))

    class Made(HourPlan):
        def steps(self, folder: Path) -> list[object]:
            return steps

    return Made(**vars(base))


def test_a_step_that_fails_says_what_to_type_and_is_the_first_that_is_taken_again(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    marker, folder = tmp_path / "mended", tmp_path / "hour"
    fails = (
        f"import pathlib, sys; print('neuronx-cc failed with -9'); sys.exit(not pathlib.Path({str(marker)!r}).exists())"
    )
    plan = of_steps(script, "toy", one="print('first')", two=fails, three="raise SystemExit(3)")
    assert script.run_plan(plan, folder) == 1
    said = capsys.readouterr().out
    assert "step two failed" in said and "next: mend two" in said and "[three]" not in said
    assert f"then: python {SCRIPT} toy --folder {folder}" in said
    assert "The host's memory ran out" in said, "what doctor --log knows of it"
    marker.touch()
    assert script.run_plan(plan, folder) == 1
    said = capsys.readouterr().out
    assert "[one] done before" in said and "[two] done in" in said and "step three failed" in said
    states = {"one": "done", "two": "done", "three": "failed"}
    assert {name: status for name, (status, _) in json.loads((folder / "state.json").read_text()).items()} == states


PLANTED = f"""
import sys
sys.path[:0] = [{str(ROOT)!r}, {str(FOLDER)!r}]
import smoke
{{plant}}
sys.exit(smoke.main(["cpu", "--folder", sys.argv[1]]))
"""
PLANTS = {
    "nothing": ("pass", "", "smoke passed: 24 of 24 tokens are the CPU's"),
    "a compiler failure": (
        "from tandem.runners.torch.graphs import GraphCompiler\n"
        "def fails(*given): raise RuntimeError('neuronx-cc failed with 70')\n"
        "GraphCompiler._compile = fails",
        "failed",
        "The compiler gave up on a graph",
    ),
    "a wrong token": (
        "right = smoke.fused\nsmoke.fused = lambda *given: [*right(*given)[:-1], 0]",
        "failed",
        "wrong token: a fused round says 0 at",
    ),
    "a hang": ("import time\nsmoke.load = lambda *given: time.sleep(600)", "ended: too long", "next: mend smoke"),
}


@pytest.mark.thorough
@pytest.mark.parametrize("plant", PLANTS)
def test_a_smoke_step_ends_with_a_bundle_and_the_right_line(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], plant: str
) -> None:
    code, ended, line = PLANTS[plant]
    program = PLANTED.format(plant=code).replace("sys.argv[1]", repr(str(tmp_path / "pair")))
    plan, folder = of_steps(script, "toy", smoke=program, later="raise SystemExit(3)"), tmp_path / "hour"
    assert script.run_plan(plan, folder, most_minutes=0.5 if plant == "a hang" else 5) == 1
    said = capsys.readouterr().out
    assert line in said and f"send back {tmp_path / 'hour.tar.gz'}" in said
    step = "later" if plant == "nothing" else "smoke"
    assert f"step {step} {ended or 'failed'}" in said
    status = (ended or "done").removeprefix("ended: ")
    with pytest.raises(SystemExit):
        compare.main(["--from-records", str(tmp_path / "hour.tar.gz")])
    shown = capsys.readouterr()
    assert f"toy came this far: smoke {status}" in shown.err and "nothing was measured" in shown.err
    assert shown.out == ""  # which is for --json


def test_a_lost_connection_leaves_a_bundle_that_says_how_far_it_came(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = "import sys, pathlib, time; pathlib.Path({at!r}).touch(); time.sleep(600)".format(at=str(tmp_path / "began"))
    program = (
        f"import sys; sys.path[:0] = [{str(FOLDER)!r}]\nimport first_hour, plans\n"
        f"step = plans.Step('compile', (('python', '-c', {slow!r}),), 1, 5, 'again')\n"
        f"plans.HourPlan.steps = lambda self, folder: [step]\n"
        f"sys.exit(first_hour.main(['toy', '--folder', {str(tmp_path / 'hour')!r}]))"
    )
    with subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True) as hour:
        while not (tmp_path / "began").exists():
            assert hour.poll() is None
            time.sleep(0.05)
        hour.send_signal(signal.SIGHUP)
        said, _ = hour.communicate(timeout=60)
    assert hour.returncode == 130 and "send back" in said
    with pytest.raises(SystemExit):
        compare.main(["--from-records", str(tmp_path / "hour.tar.gz")])
    assert "toy came this far: compile interrupted" in capsys.readouterr().err


def test_a_bundle_finds_another_place_if_its_disk_is_full(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import bundle  # type: ignore[import-not-found]

    write = bundle.make_bundle

    def full(plan: object, folder: Path, state: object, file: Path) -> Path:
        if file.parent == tmp_path / "full":
            raise OSError(28, "No space left on device")
        return write(plan, folder, state, file)  # type: ignore[no-any-return]

    (tmp_path / "full" / "hour").mkdir(parents=True)
    monkeypatch.setattr(bundle, "make_bundle", full)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert bundle.keep_bundle(of_steps(script, "toy"), tmp_path / "full" / "hour", {}) == tmp_path / "hour.tar.gz"


def test_an_hour_goes_on_despite_a_failed_step_if_told_to(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = of_steps(script, "toy", one="raise SystemExit(1)", two="raise SystemExit(3)")
    with pytest.raises(ValueError, match="despite: no step one has been taken in"):
        script.run_plan(plan, tmp_path, "one")
    assert script.run_plan(plan, tmp_path) == 1 and "[two]" not in capsys.readouterr().out
    assert script.run_plan(plan, tmp_path, "one") == 1
    said = capsys.readouterr().out
    assert "[one] failed before" in said and "step two failed" in said
    assert json.loads((tmp_path / "state.json").read_text())["one"][0] == "failed", "the bundle says so"


def test_a_state_of_something_else_is_refused_by_its_file(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "state.json").write_text('["?"]', "utf-8")
    assert script.main(["toy", "--folder", str(tmp_path)]) == 2
    assert "state.json: is not a state of this script" in capsys.readouterr().err


def test_a_bundle_has_no_secrets(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from bundle import make_bundle  # type: ignore[import-not-found]

    monkeypatch.setenv("HOME", "/home/someone")
    folder = tmp_path / "hour"
    folder.mkdir()
    secrets = (
        "hf_AbCdEfGhIjKlMn",
        "AKIAABCDEFGHIJKLMNOP",
        "Bearer s3cr3t-t0ken",
        "token=s3cr3t",
        "/home/someone/models",
    )
    key = "-----BEGIN PRIVATE KEY-----\nMIIEvQ\n-----END PRIVATE KEY-----"
    (folder / "serve.log").write_text("\n".join([*secrets, key, "serving at 127.0.0.1:50051"]), "utf-8")
    (folder / "weights.safetensors").write_text("weights", "utf-8")
    with tarfile.open(make_bundle(of_steps(script, "toy"), folder, {}, tmp_path / "hour.tar.gz")) as bundle:
        assert bundle.getnames() == ["about.json", "serve.log"]
        member = bundle.extractfile("serve.log")
        assert member is not None
        text = member.read().decode()
    assert not [part for part in ("AbCd", "AKIA", "s3cr3t", "someone", "MIIE") if part in text], text
    assert "serving at 127.0.0.1:50051" in text


ABOUT = '{"format": "tandem-first-hour-1", "steps": {}}'


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({}, "has no about.json"),
        ({"about.json": '{"format": "other", "steps": {}}'}, "is not of format"),
        ({"about.json": '{"format": "tandem-first-hour-1"}'}, "is not of format"),
        ({"about.json": ABOUT}, "nothing was measured"),
        ({"about.json": ABOUT, "measured/records.jsonl": "?"}, "records.jsonl"),
    ],
)
def test_a_bundle_that_is_none_is_refused(
    tmp_path: Path, files: dict[str, str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with tarfile.open(tmp_path / "bundle.tar.gz", "w:gz") as bundle:
        for name, text in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(text)
            bundle.addfile(member, io.BytesIO(text.encode()))
    with pytest.raises(SystemExit):
        compare.main(["--from-records", str(tmp_path / "bundle.tar.gz")])
    assert said in capsys.readouterr().err


def commands_for(instance: str) -> list[str]:
    printed = subprocess.run(
        [sys.executable, SCRIPT, instance, "--print"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    others = ("#", "python -m pip", "python deploy/first-hour/first_hour.py same")
    lines = [line.replace("python -m torch.distributed.run", "torchrun") for line in printed.splitlines()]
    return [line for line in lines if not line.startswith(others) and "smoke.py" not in line]


@pytest.mark.parametrize("instance", ["trn2.3xlarge", "trn1.2xlarge"])
def test_the_commands_for_a_device_are_understood(instance: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = commands_for(instance)
    assert len(lines) >= 7
    monkeypatch.setattr(Command, "instance", instance)
    for line in lines:
        with monkeypatch.context() as alone:  # torchrun's variables are those of one command
            checks.check(Command(checks.FIRST_HOUR, line), alone)


def test_what_is_compiled_is_what_the_comparison_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """On TorchNeuron: the degrees, rows, lengths and drafts of each server are among those compiled."""
    from tandem.host.devices import Devices
    from tandem.host.instances import family_of, instance_named
    from tests.planning.support import CONFIGS

    instance = instance_named("trn2.3xlarge")
    chips = Devices(count=1, instance=instance.name, family=family_of(instance.name))
    monkeypatch.setattr(compare, "find_devices", lambda *where: chips)
    shapes: dict[str, set[tuple[object, ...]]] = {"compiled": set(), "served": set()}
    parts = {"target": "target", "fused_target": "fused", "draft_worker": "draft"}
    for line in commands_for("trn2.3xlarge"):
        words = shlex.split(line.replace("/models/Q", f"{CONFIGS}/Q"))
        if "compile" in words:
            args = RoleParser().parse_args(words[words.index("main.py") + 1 :])
            for part in args.compile_for.split(","):
                shapes["compiled"].add((part, args.tp_degree, args.batch, args.sequence_length, args.most_drafts))
        elif "compare_architectures.py" in words:
            config = compare.build_config(compare.build_parser().parse_args(words[2:]))
            for command in checks.server_commands(config):
                args = RoleParser().parse_args(command)
                shapes["served"].add(
                    (parts[args.role], args.tp_degree, args.batch, args.sequence_length, args.most_drafts)
                )
    assert shapes["served"] and shapes["served"] <= shapes["compiled"]


def test_what_is_compiled_for_nxd_inference_is_what_the_comparison_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """On Trn1. A folder is named by the configuration it was compiled for; any other is compiled again, for hchecks."""
    monkeypatch.setattr(Command, "instance", "trn1.2xlarge")
    compiled: list[object] = []
    loaded: list[object] = []
    for line in commands_for("trn1.2xlarge"):
        command = Command(checks.FIRST_HOUR, line)
        if "compile" in command.words:
            compiled.append(checks.nxdi_build(RoleParser().parse_args(command.arguments)))
        elif command.program == "compare_architectures.py":
            servers = [words for words in checks.compared_servers(command, monkeypatch) if "nxdi" in words]
            loaded += [checks.nxdi_build(RoleParser().parse_args(words)) for words in servers]
    assert len(compiled) == 2 and len(loaded) > 4
    assert [each for each in loaded if each not in compiled] == []
    assert [each for each in compiled if each not in loaded] == []
