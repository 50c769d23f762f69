"""--backend nxdi on a machine without it, and with PyPI's placeholders: one line, exit code 2."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tandem.cli import main
from tandem_nxdi import backend
from tests.daily import daily

ROLES = (
    ["--role", "target"],
    ["--role", "fused_target", "--draft_model", "tandem/checkpoints/embedded_draft"],
    ["--role", "verify_target", "--prompt", "x"],
)


@pytest.mark.parametrize("role", daily(ROLES, 0, 2), ids=lambda words: words[1])
def test_asking_for_nxdi_where_it_is_not_is_one_line(role: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    if backend.importable("neuronx-distributed-inference"):
        pytest.skip("NxD Inference is installed here")
    listening = [] if "verify_target" in role else ["--port", "0"]
    assert main.main([*role, "--backend", "nxdi", "--tp_degree", "32", *listening]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("main.py:")]
    assert len(lines) == 1 and lines[0].startswith("main.py: backend: nxdi is not available here: ")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--backend", "nxdi", "--neuron_config", '{"fused_qkvs": true}'], "neuron_config: .*did you mean fused_qkv"),
        (["--neuron_config", '{"fused_qkv": true}'], "neuron_config: .* does not take it; --backend nxdi does"),
        (["--backend", "nxdi", "--eagle"], "eagle: --role target does not take it; these do: fused_target"),
        (["--backend", "nxdi", "--tp_degree", "0"], "tp_degree: 0 is below 1"),
    ],
)
def test_wrong_flags_are_one_line(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["--role", "target", *words]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("main.py:")]
    assert re.search(said, line)


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that comes first on the path, where packages look installed."""
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [n for n in sys.modules if n.split(".")[0] in ("neuronx_distributed_inference", "torch_neuronx")]:
        monkeypatch.delitem(sys.modules, name)
    return tmp_path


def install(folder: Path, name: str, version: str, *files: str, rest: str = "") -> None:
    module = folder / name.replace("-", "_")
    module.mkdir()
    for file in files:
        (module / file).write_text("")
    metadata = folder / f"{module.name}-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{rest}")


def test_pypis_placeholders_are_recognised_and_named(packages: Path) -> None:
    wrong = "Summary: WRONG PACKAGE. Use AWS's index\n"
    install(packages, "torch-neuronx", "1.0", "__init__.py", rest=wrong)
    install(packages, "neuronx-distributed-inference", "0.1.0", rest=wrong)
    with pytest.raises(ValueError, match=r"nxdi is not available here: .*torch-neuronx 1\.0.*placeholder.* from PyPI"):
        backend.require_nxdi()


def test_the_real_packages_are_taken_for_what_they_are(packages: Path) -> None:
    for name in backend.PACKAGES:
        install(packages, name, "2.9", "__init__.py", "models.py")
    backend.require_nxdi()
    assert backend.versions()["torch-neuronx"] == "2.9"
