"""--backend nxdi on a machine without it, and with PyPI's placeholders: one line, exit code 2."""

from __future__ import annotations

import importlib.metadata
import re
import shutil
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


def test_versions_that_nxd_inference_does_not_want_are_refused_where_it_calls_them(packages: Path) -> None:
    def asks(*needs: str) -> None:
        for name in backend.PACKAGES:
            shutil.rmtree(packages / name.replace("-", "_"), ignore_errors=True)
            shutil.rmtree(packages / f"{name.replace('-', '_')}-0.9.dist-info", ignore_errors=True)
            lines = needs if name == "neuronx-distributed-inference" else ()
            rest = "".join(f"Requires-Dist: {need}\n" for need in lines)
            install(packages, name, "0.9", "__init__.py", "models.py", rest=rest)

    asks("pytest==0.1.*", "torch", "absent==1")
    backend.require_nxdi()
    asks("transformers==4.1.*", "torch==2.1.*")
    with pytest.raises(ValueError, match="backend: nxdi is not available here: ") as refused:
        backend.require_nxdi()
    for name, wanted in (("transformers", "==4.1.*"), ("torch", "==2.1.*")):
        found = re.escape(importlib.metadata.version(name))
        assert re.search(f"{name} {found} is installed, and .* needs {name}{re.escape(wanted)}", str(refused.value))
    words = ["--role", "target", "--backend", "nxdi", "--model", "tandem/checkpoints/embedded_draft", "--port", "0"]
    assert main.main(words) == 2
