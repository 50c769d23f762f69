"""What the doctor says of machines made of files, of this one, and of errors in a log."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tandem.cli import main
from tandem.host.detect import detect
from tandem.host.host import Host, find_host
from tandem.workshops.planning.doctor import Findings, examine, finding_lines
from tandem.workshops.planning.known_errors import LINE_BYTES, errors_in, read_log
from tests.planning.support import EMPTY_ENVIRONMENT, NXDI, PLACEHOLDERS, TORCHNEURON, device, machine, neuron_ls, site

HOST = Host(
    system="Linux x86_64",
    python="3.11.7",
    processor="A processor",
    cores=8,
    memory_bytes=32 * 2**30,
    features=("avx2",),
    compiler="/usr/bin/g++",
    libraries={"torch": "2.13.0+cpu"},
    gpus=(),
)


def examined(root: Path, packages: dict[str, str], host: Host = HOST, *, placeholders: bool = False) -> Findings:
    path = site(root / "site", packages, placeholders=placeholders)
    return examine(host, detect(root, path, EMPTY_ENVIRONMENT))


def test_a_bare_trn2_is_told_to_install_torchneuron_and_which_python(tmp_path: Path):
    findings = examined(machine(tmp_path, "trn2.3xlarge", 1), {})
    text = "\n".join(finding_lines(findings))
    assert "Install TorchNeuron: python -m pip install" in text and "pip.repos.neuron.amazonaws.com" in text
    assert "Use Python 3.12 to 3.14" in text
    newer = replace(HOST, python="3.12.4")
    assert not any("Use Python" in step for step in examine(newer, findings.neuron).next)


def test_placeholders_are_to_be_removed_first(tmp_path: Path):
    findings = examined(machine(tmp_path, "trn2.3xlarge", 1), PLACEHOLDERS, placeholders=True)
    assert findings.next[0].endswith("pip uninstall -y torch-neuronx neuronx-cc neuronx-distributed-inference")
    text = "\n".join(finding_lines(findings))
    assert "neuronx-cc 1.0.post1: PyPI's placeholder, not the package" in text


@pytest.mark.parametrize(("packages", "runs"), [(TORCHNEURON, "neuron"), (NXDI, "nxdi")])
def test_a_machine_that_is_ready_is_sent_to_plan_and_serve(tmp_path: Path, packages: dict[str, str], runs: str):
    root = machine(tmp_path, "trn2.48xlarge", 16, "2.31.7.0")
    busy = {"neuron_processes": [{"pid": 7, "command": "serve"}]}
    neuron_ls(root, says=[device(n, "trn2.48xlarge", 4, 96 * 2**30, 2, **busy) for n in range(16)])
    findings = examined(root, packages)
    assert findings.devices[runs] is None
    text = "\n".join(finding_lines(findings))
    assert "16 of trn2.48xlarge, 64 cores at LNC 2, 24 GiB a core" in text and "driver         2.31.7.0" in text
    assert f"Plan, compile, serve on {'TorchNeuron' if runs == 'neuron' else 'NxD Inference'}" in findings.next[0]
    assert any("Cores are held by 1 other" in step for step in findings.next)
    assert any("NEURON_RT_VISIBLE_CORES says which (as in 0-63)" in step for step in findings.next)


def test_the_cpu_serves_without_torch_but_not_without_native_steps_and_torch(tmp_path: Path):
    def judged(**change: object) -> Findings:
        return examined(machine(tmp_path), {}, replace(HOST, **change))  # type: ignore[arg-type]

    torchless = {"tokenizers": "0.23.3"}
    assert judged(libraries=torchless).devices["cpu"] is None
    bare = judged(libraries=torchless, compiler=None)
    assert (
        bare.devices["cpu"] == "there is neither a C++ compiler for native steps nor torch for module code: make setup"
    )
    assert any("compiled already for x86-64 Linux: make setup" in step for step in bare.next)
    assert judged(libraries={}).devices["cpu"] == "tokenizers, which servers need, is not installed: make setup"


@pytest.mark.parametrize(
    ("change", "device_says", "step"),
    [
        ({}, "nvidia-smi finds no GPU", "Serve on the CPU"),
        ({"compiler": None}, "nvidia-smi finds no GPU", "Install g++ or clang++"),
        ({"libraries": {}}, "nvidia-smi finds no GPU", "Install what servers need: make setup"),
        ({"gpus": ("H200, 141 GB, 570",)}, "torch 2.13.0+cpu is built for the CPU", "install a CUDA build"),
        ({"gpus": ("H200, 141 GB, 570",), "libraries": {"torch": "2.13.0+cu130"}}, None, "--device cuda"),
    ],
)
def test_cpu_and_cuda_are_judged_too(tmp_path: Path, change: dict[str, object], device_says: str | None, step: str):
    findings = examined(machine(tmp_path), {}, replace(HOST, **change))  # type: ignore[arg-type]
    assert findings.devices["cuda"] == device_says
    assert any(step in said for said in findings.next)


def test_the_host_is_read_from_files_and_tools(tmp_path: Path):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text("model name : A CPU\nflags : fpu avx2 avx512_bf16\n\nmodel name : other\n")
    (tmp_path / "proc/meminfo").write_text("MemTotal:       1024 kB\nMemFree: 1 kB\n")
    for name, body in (("nvidia-smi", 'print("H200, 143771 MiB, 570.1")'), ("g++", "")):
        (tmp_path / name).write_text(f"#!{sys.executable}\n{body}\n")
        (tmp_path / name).chmod(0o755)
    host = find_host(tmp_path, {"PATH": str(tmp_path)})
    assert (host.processor, host.memory_bytes, host.features) == ("A CPU", 2**20, ("avx2", "avx512_bf16"))
    assert host.gpus == ("H200, 143771 MiB, 570.1",) and host.compiler == str(tmp_path / "g++")
    bare = find_host(tmp_path / "nothing", {"PATH": os.devnull})
    assert (bare.memory_bytes, bare.features, bare.gpus, bare.compiler) == (None, (), (), None)


def test_the_command_looks_at_this_machine_and_exits_0(capsys: pytest.CaptureFixture[str]):
    assert main.main(["--role", "doctor"]) == 0
    out = capsys.readouterr().out
    assert all(heading in out for heading in ("Machine\n", "Neuron\n", "Where models can run\n", "What to do next\n"))
    assert main.main(["--role", "doctor", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert set(answer["devices"]) == {"cpu", "cuda", "neuron", "nxdi"}
    assert answer["devices"]["cpu"] is None and answer["next"]


MESSAGES = {
    "compiler-killed": "RuntimeError: neuronx-cc failed with -9",
    "compiler-70": "RuntimeError: neuronx-cc failed with 70",
    "compiler-unhandled": (
        "[INTERNAL_ERROR] [NCC_INLA001] Unhandled exception with message: [json.exception.type_error.302] "
        "type must be boolean, but is null"
    ),
    "tile-too-large": (
        "USER 5521 [neuronxcc.driver.CommandDriver]: [NLA001]  Unhandled exception with message: Allocated "
        "memory out of bound {maximum.11_VN_0}@SB<0,185856>(756257x10376)"
    ),
    "too-many-instructions": "[NCC_EBVF030] The number of instructions generated exceeds the limit.",
    "compiler-device-memory": (
        "[NCC_EOOM001] The combined memory needed for the model's activation tensors exceeds the "
        "high-bandwidth memory limit."
    ),
    "logical-cores": "[NCC_EARG001] Unsupported Logical Neuron Core (LNC) configuration.",
    "device-memory": (
        "2024-Oct-15 18:01:17.728750  3882:3882  ERROR  TDRV:dmem_alloc_internal    Failed to alloc DEVICE "
        "memory: 180355072"
    ),
    "cores-held": (
        "ERROR  NRT:nrt_allocate_neuron_cores   Logical Neuron Core(s) not available - Requested:2 Available:0"
    ),
    "no-device": "ERROR  TDRV:tdrv_get_dev_info                       No neuron device available",
    "no-runtime-library": "OSError: libnrt.so.1: cannot open shared object file: No such file or directory",
    "neff-version": "nrt_load failed: NRT_UNSUPPORTED_NEFF_VERSION (10)",
    "topology": (
        "273:478   ERROR   NRT:nrt_load_collectives                    Unsupported topology. Supported number"
        " of Neuron Cores is 1, 2, 8, 16 or a multiple of 32."
    ),
    "numerical-error": "RuntimeError: Failed to execute the model status=1003 message=Numerical Error",
    "draft-scales": "RuntimeError: Cannot find draft_model.layers.1.mlp.gate_proj.scale in state_dict",
    "placeholder": (
        "tandem: torch-neuronx 1.0 is a placeholder from PyPI; install AWS's own from "
        "https://pip.repos.neuron.amazonaws.com"
    ),
    "two-stacks": (
        "torch-neuronx 2.9.0.2.12.22436 is the XLA package; TorchNeuron (SDK 2.33 or newer) needs an "
        "environment of its own"
    ),
    "claim-source": (
        'Error creating: Pod "demo-dra-tz69j" is invalid: spec.resourceClaims[0]: Invalid value: '
        "core.PodResourceClaim{}: must specify one of: `resourceClaimName`, `resourceClaimTemplateName`"
    ),
    "claim-not-met": "0/1 nodes are available: 1 cannot allocate all claims. still not schedulable",
    "device-plugin": "0/3 nodes are available: 3 Insufficient aws.amazon.com/neuron.",
}
"""Lines as logs of others have them, shortened (the addresses are in the table), and Tandem's own."""
LINES = list(MESSAGES.items())


@pytest.mark.parametrize(("name", "line"), LINES, ids=[line[:60] for _, line in LINES])
def test_a_message_is_recognised_as_one_error(name: str, line: str) -> None:
    assert [error.name for error in errors_in(line)] == [name]


def test_a_log_is_read_line_by_line_and_each_error_is_told_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "server.log"
    log.write_bytes(b"\xff starting\n" + f"{LINES[0][1]}\nwell\n{LINES[0][1]}\n".encode() + LINES[-1][1].encode())
    found = list(read_log(log))
    assert [(error.name, line) for line, _, error in found] == [("compiler-killed", 2), ("device-plugin", 5)]
    assert main.main(["--role", "doctor", "--log", str(log)]) == 0
    shown = capsys.readouterr().out
    assert f"{log}:2: RuntimeError: neuronx-cc failed with -9" in shown
    assert all(text in shown for *_, error in found for text in (error.cause, error.command))
    assert main.main(["--role", "doctor", "--json", "--log", str(log)]) == 0
    assert [one["error"]["name"] for one in json.loads(capsys.readouterr().out)] == ["compiler-killed", "device-plugin"]


def test_a_log_without_line_ends_is_read_in_pieces(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text("x" * (LINE_BYTES + 7) + LINES[0][1], "utf-8")
    assert [error.name for *_, error in read_log(log)] == ["compiler-killed"]


def test_a_log_without_known_errors_is_exit_code_1_and_one_that_is_not_there_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "server.log"
    log.write_text("serving\n", "utf-8")
    assert main.main(["--role", "doctor", "--log", str(log)]) == 1
    assert "none of the" in capsys.readouterr().out
    assert main.main(["--role", "doctor", "--log", str(tmp_path / "absent.log")]) == 2
    assert "log: " in (said := capsys.readouterr().err) and "absent.log cannot be read: No such file" in said
