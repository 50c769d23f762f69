"""Devices are described in one place, and one that is not here is refused in one line that says what is missing."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import LlamaForCausalLM

from tandem.cli import main
from tandem.runners.load_runner import Execution, prepared_platform
from tandem.runners.protocol import StepShapes
from tandem.runners.torch import platforms
from tandem.runners.torch.graph_runner import GraphRunner
from tandem.runners.torch.graphs import buckets_for
from tandem.runners.torch.platforms import CPU, CUDA, DEVICES, NEURON, choose_platform, compile_order, platform_of
from tests.runners.compiled import FAMILIES, LIMITS

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that comes first on the path."""
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def install(site: Path, version: str, *files: str, description: str = "") -> None:
    """Makes torch-neuronx look installed, with these files."""
    info = site / f"torch_neuronx-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch-neuronx\nVersion: {version}\n\n{description}\n")
    (info / "RECORD").write_text("".join(f"torch_neuronx/{file},,\n" for file in files))


@pytest.mark.skipif(importlib.util.find_spec("torch_neuronx") is not None, reason="torch-neuronx is here")
def test_neuron_without_its_software_is_one_line_that_says_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    LlamaForCausalLM(FAMILIES["llama"]()[1]).save_pretrained(tmp_path)
    arguments = ["--role", "verify_target", "--device", "neuron", "--model", str(tmp_path), "--prompt", "x"]
    capsys.readouterr()
    assert main.main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == (
        "main.py: device: neuron is not available here (torch-neuronx is not installed (AWS's index: "
        "https://pip.repos.neuron.amazonaws.com); python main.py --role doctor says more)"
    )


@pytest.mark.parametrize(
    ("version", "file", "description", "said"),
    [
        ("1.0", "", "WRONG PACKAGE. Please install", "torch-neuronx 1.0 is a placeholder from PyPI; install AWS's own"),
        ("2.9.0.2", "xla_impl/trace.py", "", "torch-neuronx 2.9.0.2 is the XLA package; TorchNeuron"),
    ],
)
def test_what_is_no_torchneuron_is_named(site: Path, version: str, file: str, description: str, said: str) -> None:
    install(site, version, file, description=description)
    with pytest.raises(ValueError, match=said):
        choose_platform("neuron")


def test_without_a_device_a_chip_is_named_to_compile_for_and_the_runtime_is_not_asked(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(site, "2.14.3.0.1", "neuron_dynamo_backend.py")
    (site / "neuronx_cc-2.28.7631.0.dist-info").mkdir()
    (site / "neuronx_cc-2.28.7631.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: neuronx-cc\nVersion: 2.28.7631.0\n"
    )
    monkeypatch.setattr(platforms, "_neuron", lambda: pytest.fail("the runtime was asked"))
    monkeypatch.setenv("TORCH_NEURONX_COMPILE_ONLY", "1")
    monkeypatch.delenv("NEURON_PLATFORM_TARGET_OVERRIDE", raising=False)
    assert NEURON.absent() == (
        "TORCH_NEURONX_COMPILE_ONLY=1 needs NEURON_PLATFORM_TARGET_OVERRIDE, the chip to compile for: trn2 or trn3"
    )
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn2")
    assert NEURON.absent() is None
    assert NEURON.describe() == "neuron (no device: graphs are compiled for trn2)"
    runner = GraphRunner.__new__(GraphRunner)
    runner.model = SimpleNamespace(platform=NEURON)  # type: ignore[assignment]
    with pytest.raises(ValueError, match="device: with TORCH_NEURONX_COMPILE_ONLY=1 only --role compile works"):
        runner.warm_up()


def test_an_unknown_device_and_what_a_device_cannot_compile_are_refused() -> None:
    assert DEVICES == ("auto", "cpu", "cuda", "neuron")
    with pytest.raises(ValueError, match="device: 'tpu' is not one of auto, cpu, cuda, neuron"):
        platform_of("tpu")
    with pytest.raises(ValueError, match="compile: 'fast' is not one of auto, native, inductor, neuron, off"):
        Execution(compile="fast")
    chosen = [compile_order("auto", platform) for platform in (CPU, CUDA, NEURON)]
    assert chosen == [("native", "off"), ("inductor",), ("neuron",)] and compile_order("off", CUDA) == ("off",)
    with pytest.raises(ValueError, match="compile: native is not for neuron: auto or neuron"):
        compile_order("native", NEURON)
    with pytest.raises(ValueError, match="compile: neuron is not for cpu: auto or native or off"):
        compile_order("neuron", CPU)


def test_compiled_code_is_kept_where_it_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path))
    for name in (NEURON.code, NEURON.cores, *NEURON.environment):
        monkeypatch.setenv(str(name), "")
        monkeypatch.delenv(str(name))
    NEURON.prepare()
    assert os.environ["TORCH_NEURONX_NEFF_CACHE_DIR"] == str(tmp_path / "neff")
    assert os.environ["TORCH_NEURONX_DISABLE_FALLBACK_EXECUTION"] == "1"
    assert "NEURON_RT_VISIBLE_CORES" not in os.environ
    NEURON.prepare("/shared/neff", "0-3")
    assert os.environ["TORCH_NEURONX_NEFF_CACHE_DIR"] == "/shared/neff"
    assert os.environ["NEURON_RT_VISIBLE_CORES"] == "0-3"
    NEURON.prepare()
    assert os.environ["TORCH_NEURONX_NEFF_CACHE_DIR"] == "/shared/neff", "what the environment says stays"


def test_on_the_cpu_libraries_are_asked_for_reproducible_products(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in CPU.environment:
        monkeypatch.delenv(name, raising=False)
    prepared_platform(Execution("cpu"))
    assert os.environ["MKL_CBWR"] == "AUTO,STRICT" and os.environ["ONEDNN_MAX_CPU_ISA"] == "AVX512_CORE_BF16"
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    prepared_platform(Execution("cpu"))
    assert os.environ["MKL_CBWR"] == "COMPATIBLE", "what the environment says stays"


def test_every_rank_on_a_neuron_device_sees_its_own_core_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """TorchNeuron's process group refuses a rank that sees more than one, and rank 3 of cores 8-11 is on core 11."""
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "")
    monkeypatch.setenv("TORCH_NEURONX_NEFF_CACHE_DIR", "")
    for rank in range(4):
        NEURON.prepare("/neff", "8-11", rank, 4)
        assert os.environ["NEURON_RT_VISIBLE_CORES"] == str(8 + rank)
        assert os.environ["TORCH_NEURONX_NEFF_CACHE_DIR"] == f"/neff/rank_{rank}", "no two ranks write to one cache"
    for rank in range(2):
        monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "4,6")
        for _ in ("target", "draft"):
            NEURON.prepare("/neff", None, rank, 2)
            assert os.environ["NEURON_RT_VISIBLE_CORES"] == str(4 + 2 * rank)
    with pytest.raises(ValueError, match="cores: 4 ranks use one core each, and 3 are named"):
        NEURON.prepare("/neff", "0-2", 0, 4)
    monkeypatch.setenv("LOCAL_RANK", "1")  # of two hosts with 2 ranks each, the second: each has cores 0 and 1
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    NEURON.prepare("/neff", "0,1", 3, 4)
    assert os.environ["NEURON_RT_VISIBLE_CORES"] == "1"
    assert os.environ["TORCH_NEURONX_NEFF_CACHE_DIR"] == "/neff/rank_3", "ranks are numbered over all hosts"
    with pytest.raises(ValueError, match="cores: 2 ranks use one core each, and 4 are named"):
        NEURON.prepare("/neff", "0-3", 3, 4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    CUDA.prepare("/inductor", "2,3", 1, 2)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "2,3", "a rank finds its own among all by its local rank"


@pytest.mark.thorough
def test_on_a_cpu_cores_are_those_that_every_thread_of_the_process_may_use() -> None:
    code = (
        "import os, threading, torch\n"
        "from tandem.runners.load_runner import Execution, prepared_platform\n"
        "torch.randn(300, 300) @ torch.randn(300, 300)\n"
        "first = sorted(os.sched_getaffinity(0))[0]\n"
        "prepared_platform(Execution('cpu', cores=str(first)))\n"
        "seen = {tuple(os.sched_getaffinity(int(t))) for t in os.listdir('/proc/self/task')}\n"
        "assert seen == {(first,)}, seen\n"
        "prepared_platform(Execution('cpu', cores='4000'))\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert "ValueError: cores: this process may not use all of CPUs 4000" in ran.stderr.splitlines()[-1]


def test_cores_of_a_device_that_is_not_named_are_refused() -> None:
    with pytest.raises(ValueError, match="cores: name the --device whose cores these are"):
        prepared_platform(Execution(cores="0"))


def test_buckets_are_few_where_graphs_are_dear_and_those_asked_for_besides() -> None:
    few = StepShapes((4,), (1, 2), False, chunks=(16,), drafts=(3,))
    assert buckets_for(NEURON, LIMITS) == few
    assert buckets_for(CUDA, LIMITS) == replace(few, drafts=(1, 2, 3))
    assert buckets_for(NEURON, LIMITS, (2,), (1,)) == replace(few, batches=(2,), drafts=(1, 3))
    with pytest.raises(ValueError, match="batch_buckets: 3 is outside 1 to 2, the batch"):
        buckets_for(CPU, LIMITS, (3,))
    with pytest.raises(ValueError, match="draft_buckets: 9 is outside 1 to 3, the max_speculation_length"):
        buckets_for(CPU, LIMITS, draft_buckets=(9,))
