"""What the doctor says of machines made of files, and of this one."""

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
from tests.planning.support import (
    EMPTY_ENVIRONMENT,
    NXDI,
    PLACEHOLDERS,
    TORCHNEURON,
    device,
    machine,
    neuron_ls,
    site,
)

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
