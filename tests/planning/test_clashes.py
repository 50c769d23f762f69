"""Versions that do not go together are refused with both sides named, from metadata alone."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from tandem.cli import main
from tandem.host.detect import detect, missing
from tandem.host.packages import TANDEM, TANDEM_ON_TORCHNEURON
from tandem.workshops.planning.doctor import examine, finding_lines
from tests.planning.support import EMPTY_ENVIRONMENT, NXDI, TORCHNEURON, machine, site
from tests.planning.test_doctor import HOST
from tests.test_setup import declared

NEEDS = {
    "neuronx-distributed-inference": ("torch_neuronx==2.9.*", "transformers==4.57.*", "hf-xet>=1.1.10", "not-here==1"),
    "torch-neuronx": ("torch==2.9.*", 'numpy<2; python_version < "3.0"', 'pytest==1; extra == "test"'),
}
OLD_NXDI = "neuronx-distributed-inference 0.8.16251"
GOOD = {"torch": "2.9.1", "transformers": "4.57.6", "hf-xet": "1.8.0", "protobuf": "5.29.6", "grpcio": "1.83.2"}


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ({}, []),
        (
            {"transformers": "5.23.0"},
            [f"transformers 5.23.0 is installed, and {OLD_NXDI} needs transformers==4.57.*"],
        ),
        (
            {"torch": "2.13.0+cpu"},
            ["torch 2.13.0+cpu is installed, and torch-neuronx 2.9.0.2.12.22436 needs torch==2.9.*"],
        ),
        ({"protobuf": "4.25.8"}, ["protobuf 4.25.8 is installed, and Tandem needs protobuf>=5.29,<8"]),
        ({"grpcio": "1.71.1"}, ["grpcio 1.71.1 is installed, and Tandem needs grpcio>=1.71.2,<1.84"]),
        ({"grpcio": "1.85.1"}, ["grpcio 1.85.1 is installed, and Tandem needs grpcio>=1.71.2,<1.84"]),
        ({"grpcio": "2.0.0rc1"}, ["grpcio 2.0.0rc1 is installed, and Tandem needs grpcio>=1.71.2,<1.84"]),
    ],
)
def test_what_would_go_wrong_with_nxd_inference_is_refused(tmp_path: Path, found: dict[str, str], said: list[str]):
    path = site(tmp_path / "site", {**NXDI, **GOOD, **found, "numpy": "2.4.6", "pytest": "9.2.0"}, needs=NEEDS)
    here = detect(machine(tmp_path / "root", "trn1.2xlarge", 1, "2.31"), path, EMPTY_ENVIRONMENT)
    assert [str(clash) for clash in here.clashes] == said
    why = missing("nxdi", found=here)
    assert why is None if not said else why is not None and said[0] in why


def test_torchneuron_needs_the_transformers_of_the_extra(tmp_path: Path):
    path = site(tmp_path / "site", {**TORCHNEURON, **GOOD}, needs={"torch-neuronx": ("torch==2.14.*",)})
    here = detect(machine(tmp_path / "root", "trn2.3xlarge", 1, "2.31"), path, EMPTY_ENVIRONMENT)
    why = missing("neuron", found=here) or ""
    assert "transformers 4.57.6 is installed, and Tandem needs transformers>=5.0,<6" in why
    assert "torch 2.9.1 is installed, and torch-neuronx 2.14.3.0.1 needs torch==2.14.*" in why


def test_the_doctor_has_a_line_for_each_and_says_what_to_install(tmp_path: Path):
    path = site(tmp_path / "site", {**NXDI, **GOOD, "transformers": "5.23.0", "hf-xet": "1.0.0"}, needs=NEEDS)
    here = detect(machine(tmp_path / "root", "trn1.2xlarge", 1, "2.31"), path, EMPTY_ENVIRONMENT)
    findings = examine(HOST, here)
    text = "\n".join(finding_lines(findings))
    assert re.search(r"^  clash +transformers 5\.23\.0 is installed, and .* needs transformers==4\.57\.\*$", text, re.M)
    assert "hf-xet" not in text, "pip check says what Neuron software does not call"
    assert "python -m pip install 'transformers==4.57.*'" in text
    assert re.search(r"--backend nxdi +no: transformers 5\.23\.0 is installed", text)
    assert [clash.name for clash in findings.neuron.clashes] == ["transformers"]
    assert not any("clash" in line for line in finding_lines(examine(HOST, replace(here, clashes=()))))


def test_a_program_with_a_protobuf_that_its_stubs_cannot_use_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    (folder,) = site(tmp_path, {"protobuf": "4.25.8"})
    monkeypatch.setattr(sys, "path", [folder, *sys.path])
    assert main.main(["--role", "target", "--backend", "toy", "--port", "0"]) == 2
    (line,) = [one for one in capsys.readouterr().err.splitlines() if one.startswith("main.py:")]
    assert line == (
        "main.py: protobuf 4.25.8 is installed, and Tandem needs protobuf>=5.29,<8; "
        "python main.py --role doctor says more"
    )
    assert main.main(["--role", "doctor"]) == 0
    assert "  clash          protobuf 4.25.8 is installed" in capsys.readouterr().out


def test_our_ranges_are_those_that_are_declared():
    for name, wanted in {**TANDEM, **TANDEM_ON_TORCHNEURON}.items():
        assert declared()[name] == SpecifierSet(wanted)
