"""Which Neuron software and devices are found, on machines made of files, and which versions go together."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from tandem.cli import main
from tandem.host.detect import Neuron, Stack, detect, missing
from tandem.host.packages import TANDEM, TANDEM_ON_TORCHNEURON
from tandem.workshops.planning.doctor import examine, finding_lines
from tests.planning.support import (
    EMPTY_ENVIRONMENT,
    NXDI,
    PLACEHOLDERS,
    TORCHNEURON,
    XLA,
    device,
    machine,
    neuron_ls,
    site,
)
from tests.planning.test_doctor import HOST
from tests.test_setup import declared

GIB = 2**30


def found(
    tmp_path: Path,
    packages: dict[str, str],
    instance: str | None = None,
    nodes: int = 0,
    *,
    placeholders: bool = False,
    driver: str | None = None,
    environment: dict[str, str] | None = None,
) -> Neuron:
    root = machine(tmp_path / "root", instance, nodes, driver)
    path = site(tmp_path / "site", packages, placeholders=placeholders)
    return detect(root, path, {**EMPTY_ENVIRONMENT, **(environment or {})})


# --- software ---


@pytest.mark.parametrize(
    ("packages", "stack"),
    [
        (TORCHNEURON, Stack.TORCHNEURON),
        (NXDI, Stack.NXDI),
        (XLA, Stack.XLA),
        ({"neuronx-cc": "2.23.6484.0"}, Stack.NONE),
        ({}, Stack.NONE),
    ],
)
def test_the_stack_is_told_from_metadata(tmp_path: Path, packages: dict[str, str], stack: Stack):
    assert found(tmp_path, packages).stack is stack


def test_a_native_wheel_is_known_by_its_module_whatever_its_version(tmp_path: Path):
    site(tmp_path / "site", {"torch-neuronx": "2.9.1"})
    info = tmp_path / "site" / "torch_neuronx-2.9.1.dist-info"
    (info / "RECORD").write_text("torch_neuronx/__init__.py,,\ntorch_neuronx/neuron_dynamo_backend/__init__.py,,\n")
    assert detect(tmp_path, [str(tmp_path / "site")], EMPTY_ENVIRONMENT).stack is Stack.TORCHNEURON


def test_placeholders_are_no_software_and_are_named(tmp_path: Path):
    here = found(tmp_path, PLACEHOLDERS, "trn2.48xlarge", 16, placeholders=True)
    assert here.stack is Stack.NONE
    assert {package.name: package.version for package in here.placeholders} == PLACEHOLDERS
    why = missing("neuron", found=here)
    assert why is not None and "torch-neuronx 1.0 is a placeholder from PyPI; install AWS's own from https://pip" in why
    why = missing("nxdi", found=here)
    assert why is not None and "neuronx-cc 1.0.post1, neuronx-distributed-inference 0.1.0 are placeholders" in why


def test_detection_imports_no_model_library():
    code = (
        "import sys; from tandem.host.detect import missing; missing('neuron'); missing('nxdi');"
        "from tandem.workshops.planning.doctor import examine; examine();"
        "print([m for m in ('torch', 'transformers', 'numpy', 'torch_neuronx') if m in sys.modules])"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert said.stdout.strip() == "[]"


# --- devices ---


def test_a_trn1_is_read_from_neuron_ls(tmp_path: Path):
    root = machine(tmp_path, "trn1.2xlarge", 1, "2.26.5.0")
    neuron_ls(root, says=[device(0, "trn1.2xlarge", 2, 32 * GIB, None)])
    devices = detect(root, [], EMPTY_ENVIRONMENT).devices
    assert (devices.count, devices.cores, devices.lnc, devices.core_bytes) == (1, 2, 1, 16 * GIB)
    assert (devices.instance, devices.family, devices.driver) == ("trn1.2xlarge", "trn1", "2.26.5.0")


def test_a_trn2_counts_logical_cores_and_names_who_holds_them(tmp_path: Path):
    root = machine(tmp_path, nodes=16)
    busy = {"neuron_processes": [{"pid": 7, "command": "python main.py", "neuron_runtime_version": "2.0.0"}]}
    neuron_ls(root, says=[device(n, "trn2.48xlarge", 4, 96 * GIB, 2, **(busy if n < 2 else {})) for n in range(16)])
    (root / "opt/aws/neuron/lib").mkdir(parents=True)
    for name in ("libnrt.so.1", "libnrt.so.2.35.30.0"):
        (root / "opt/aws/neuron/lib" / name).touch()
    devices = detect(root, [], {**EMPTY_ENVIRONMENT, "NEURON_RT_VISIBLE_CORES": "0-31"}).devices
    assert (devices.count, devices.cores, devices.lnc, devices.core_bytes) == (16, 64, 2, 24 * GIB)
    assert devices.busy == ("7 python main.py",)
    assert (devices.runtime, devices.visible) == ("2.35.30.0", "0-31")


def test_without_the_tool_sysfs_counts_physical_cores(tmp_path: Path):
    root = machine(tmp_path, nodes=2)
    for number in range(2):
        architecture = root / f"sys/devices/virtual/neuron_device/neuron{number}/info/architecture"
        architecture.mkdir(parents=True)
        (architecture / "device_name").write_text("Trainium2\n")
        (architecture.parent.parent / "core_count").write_text("8\n")
    devices = detect(root, [], EMPTY_ENVIRONMENT).devices
    assert (devices.count, devices.family, devices.cores, devices.lnc) == (2, "trn2", 8, 2)
    devices = detect(root, [], {**EMPTY_ENVIRONMENT, "NEURON_LOGICAL_NC_CONFIG": "1"}).devices
    assert (devices.cores, devices.lnc) == (16, 1)


@pytest.mark.parametrize(
    ("prints", "code", "problem"),
    [
        ("neuron-ls: no driver", 1, "neuron-ls finds no devices: neuron-ls: no driver"),
        ("[]", 0, ""),
        ('{"neuron_devices": 3}', 0, ""),
        ('["neuron0"]', 0, ""),
    ],
)
def test_a_neuron_ls_that_fails_or_says_nonsense_is_no_device(tmp_path: Path, prints: str, code: int, problem: str):
    neuron_ls(tmp_path, prints=prints, code=code)
    devices = detect(tmp_path, [], EMPTY_ENVIRONMENT).devices
    assert (devices.count, devices.cores, devices.problem) == (0, None, problem)


# --- the one line ---


@pytest.mark.parametrize(
    ("backend", "packages", "instance", "nodes", "driver", "says"),
    [
        ("neuron", {}, None, 0, None, "torch-neuronx is not installed"),
        ("neuron", XLA, "trn2.3xlarge", 1, None, "torch-neuronx 2.9.0.2.12.22436 is the XLA package"),
        ("neuron", TORCHNEURON, "trn1.2xlarge", 1, None, "TorchNeuron does not run on trn1; use --backend nxdi"),
        ("neuron", TORCHNEURON, "trn2.3xlarge", 0, None, "the driver (aws-neuronx-dkms) is not loaded"),
        ("neuron", TORCHNEURON, None, 0, None, "not a Neuron instance, or a container without its devices"),
        ("neuron", {"torch-neuronx": "2.14.3.0"}, "trn2.3xlarge", 1, None, "neuronx-cc is not installed"),
        ("nxdi", TORCHNEURON, "trn2.3xlarge", 1, None, "this environment holds TorchNeuron"),
        ("nxdi", XLA, "trn1.2xlarge", 1, None, "neuronx-distributed, neuronx-distributed-inference are not installed"),
        ("nxdi", NXDI, "inf2.xlarge", 0, "2.26", "there is no /dev/neuron*"),
        (
            "nxdi",
            {**NXDI, "neuronx-distributed-inference": "0.10.18399"},
            "trn1.2xlarge",
            1,
            None,
            "0.10.18399 does not support trn1; install that of SDK 2.28.1",
        ),
    ],
)
def test_what_is_missing_is_one_line(
    tmp_path: Path,
    backend: str,
    packages: dict[str, str],
    instance: str | None,
    nodes: int,
    driver: str | None,
    says: str,
):
    why = missing(backend, found=found(tmp_path, packages, instance, nodes, driver=driver))
    assert why is not None and says in why and "\n" not in why


@pytest.mark.parametrize(
    ("backend", "packages", "instance"),
    [
        ("neuron", TORCHNEURON, "trn2.48xlarge"),
        ("neuron", TORCHNEURON, "trn3pd98.3xlarge"),
        ("nxdi", NXDI, "trn1.32xlarge"),
        ("nxdi", {**NXDI, "neuronx-distributed-inference": "0.10.18399"}, "trn2.48xlarge"),
    ],
)
def test_nothing_is_missing_where_all_is_here(tmp_path: Path, backend: str, packages: dict[str, str], instance: str):
    assert missing(backend, found=found(tmp_path, packages, instance, 1)) is None


def test_compiling_needs_no_device(tmp_path: Path):
    here = found(tmp_path, TORCHNEURON)
    assert missing("neuron", found=here) is not None
    assert missing("neuron", compile_only=True, found=here) is None
    with pytest.raises(ValueError, match="'cuda' is neither neuron nor nxdi"):
        missing("cuda")


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
        ({"transformers": "5.23.0"}, [f"transformers 5.23.0 is installed, and {OLD_NXDI} needs transformers==4.57.*"]),
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
