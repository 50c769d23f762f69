"""The devices that models run on; no other module distinguishes them."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tandem.checkpoints.hub_files import is_installed
from tandem.checkpoints.trusted_cache import cache_root
from tandem.host.cores import format_cores, parse_cores, share_of
from tandem.host.detect import DOCTOR, missing
from tandem.host.host import first_processor
from tandem.installing import install_command

_GPUS = ("nvidia[0-9]*", "nvidiactl", "dxg", "kfd")  # of NVIDIA, of Windows' Linux, of AMD, which torch calls CUDA too
GLOO = "gloo_of_one_thread"  # registered with torch.distributed by tensor_parallel.py
COMPILE_ONLY, TARGET = "TORCH_NEURONX_COMPILE_ONLY", "NEURON_PLATFORM_TARGET_OVERRIDE"


@dataclass(frozen=True, slots=True)
class Platform:
    """How one kind of device is used."""

    name: str  # as in --device
    device: str  # torch's name
    compilers: tuple[str, ...]  # supported values of --compile
    automatic: tuple[str, ...]  # those to try, in order
    shared: tuple[str, ...]  # those to try if ranks share a model
    collectives: str  # torch.distributed's backend
    absent: Callable[[], str | None]  # why the device is unavailable
    has_bfloat16: Callable[[], bool]
    backend: str = "inductor"  # dynamo's
    cores: str | None = None  # variable for a process's cores; None: CPU affinity
    core_per_rank: bool = False  # a rank sees one core
    code: str | None = None  # variable for the folder of compiled code
    folder: str = "compiled"  # its name in Tandem's cache
    environment: Mapping[str, str] = field(default_factory=dict)  # set before first use
    every_bucket: bool = False  # graphs are cheap
    only_graphs: bool = False  # no module code between graphs
    packs: bool = False  # uses oneDNN's prepacked products; moves 16-bit floats as integers

    def require(self) -> None:
        """Raises ValueError, one line, if the device cannot be used."""
        if why := self.absent():
            raise ValueError(f"device: {self.name} is not available here ({why})")

    def kept(self, folder: str | None) -> Path:
        """The folder of compiled code: `folder`, or one in Tandem's cache."""
        return Path(folder).expanduser() if folder else cache_root() / self.folder

    def prepare(self, folder: str | None = None, cores: str | None = None, rank: int = 0, degree: int = 1) -> None:
        """Sets variables and this process's `cores` ("0-3", of all ranks here) before first use. Raises ValueError."""
        for name, value in self.environment.items():
            os.environ.setdefault(name, value)
        if self.code is not None and (folder or self.code not in os.environ):
            kept = self.kept(folder)
            os.environ[self.code] = str(kept / f"rank_{rank}" if self.core_per_rank and degree > 1 else kept)
        if cores is None and self.core_per_rank and degree > 1:
            several = os.environ.get(self.cores or "", "")
            cores = several if {",", "-"} & set(several) else None  # a list of several is the user's, for all ranks
        if cores is not None:
            self._take(parse_cores(cores), rank, degree)

    def _take(self, cores: tuple[int, ...], rank: int, degree: int) -> None:
        here, ranks = _on_this_host(rank, degree)
        if self.core_per_rank and degree > 1 and len(cores) != ranks:
            raise ValueError(f"cores: {ranks} ranks use one core each, and {len(cores)} are named")
        if self.cores is None:
            _pin(share_of(cores, here, ranks))
        else:
            os.environ[self.cores] = format_cores(share_of(cores, here, ranks) if self.core_per_rank else cores)

    def describe(self) -> str:
        """A log line: name, cores."""
        if self.only_graphs and compiles_only():
            return f"{self.name} (no device: graphs are compiled for {os.environ[TARGET]})"
        visible = os.environ.get(self.cores or "", "")
        return f"{self.name} ({self.cores}={visible})" if visible else self.name


def platform_of(device: str) -> Platform:
    try:
        return PLATFORMS[device]
    except KeyError:
        raise ValueError(f"device: {device!r} is not one of {', '.join(DEVICES)}") from None


def choose_platform(name: str) -> Platform:
    """The named platform; auto is CUDA if available, else CPU (asking Trainium reserves cores). Raises ValueError."""
    if name == "auto":
        return CPU if CUDA.absent() else CUDA
    platform = platform_of(name)
    platform.require()
    return platform


def compile_order(compile: str, platform: Platform, ranks: int = 1) -> tuple[str, ...]:
    """The values of --compile to try, fastest first. Raises ValueError if unsupported."""
    if compile == "auto":
        return platform.automatic if ranks == 1 else platform.shared
    if ranks > 1 and compile not in platform.shared:
        raise ValueError(
            f"compile: {compile} does not go with tp_degree on {platform.name}: {_either(platform.shared)}"
        )
    if compile not in platform.compilers:
        raise ValueError(f"compile: {compile} is not for {platform.name}: {_either(platform.compilers)}")
    return (compile,)


def _either(names: tuple[str, ...]) -> str:
    return f"auto or {' or '.join(names)}"


def _on_this_host(rank: int, degree: int) -> tuple[int, int]:
    here = (os.environ.get("LOCAL_RANK"), os.environ.get("LOCAL_WORLD_SIZE"))
    return (int(here[0]), int(here[1])) if degree > 1 and here[0] and here[1] else (rank, degree)


def _pin(cores: tuple[int, ...]) -> None:
    if not hasattr(os, "sched_setaffinity"):
        raise ValueError("cores: this system cannot restrict a process to some of its CPUs")
    try:
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(ProcessLookupError):  # it has ended
                os.sched_setaffinity(int(thread), cores)
    except OSError:
        raise ValueError(f"cores: this process may not use all of CPUs {format_cores(cores)}") from None


def _cuda_absent(devices: Path = Path("/dev")) -> str | None:
    # importing torch takes seconds, so look for a device first
    if sys.platform == "linux" and not any(any(devices.glob(name)) for name in _GPUS):
        return f"there is no {devices}/nvidia0"
    if not is_installed("torch"):
        return f"it needs torch: {install_command('torch')}"
    import torch

    return None if torch.cuda.is_available() else "torch finds no CUDA device"


def _cuda_bfloat16() -> bool:
    import torch

    return bool(torch.cuda.is_bf16_supported())


def compiles_only() -> bool:
    """Whether TorchNeuron compiles for an absent chip and runs nothing."""
    return os.environ.get(COMPILE_ONLY) == "1"


def _neuron_absent() -> str | None:
    # ask the runtime last: that reserves cores
    if why := missing("neuron", compiles_only()):
        return f"{why}; {DOCTOR}"
    if compiles_only():
        needs = f"{COMPILE_ONLY}=1 needs {TARGET}, the chip to compile for: trn2 or trn3"
        return None if os.environ.get(TARGET) else needs
    return None if _neuron().is_available() else "torch.neuron finds no core; is another process using all of them?"


def _neuron() -> Any:
    import torch
    import torch_neuronx  # noqa: F401  (registers it where torch did not load it itself)

    return torch.neuron  # type: ignore[attr-defined]


CPU = Platform(
    name="cpu",
    device="cpu",
    compilers=("native", "off"),
    automatic=("native", "off"),
    shared=("off",),
    collectives=GLOO,
    absent=lambda: None,
    has_bfloat16=lambda: "avx512_bf16" in first_processor().get("flags", "").split(),
    # On Intel's processors, MKL's products otherwise depend on where their operands lie in memory, and a row of
    # oneDNN's depends on the rows beside it if AMX computes it.
    environment={"MKL_CBWR": "AUTO,STRICT", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"},
    packs=True,
)
CUDA = Platform(
    name="cuda",
    device="cuda",
    compilers=("inductor", "off"),
    automatic=("inductor",),
    shared=("off",),
    collectives="nccl",
    absent=_cuda_absent,
    has_bfloat16=_cuda_bfloat16,
    cores="CUDA_VISIBLE_DEVICES",
    code="TORCHINDUCTOR_CACHE_DIR",
    folder="inductor",
    every_bucket=True,
)
NEURON = Platform(
    name="neuron",
    device="neuron",
    compilers=("neuron",),
    automatic=("neuron",),
    shared=("neuron",),
    collectives="neuron",
    absent=_neuron_absent,
    has_bfloat16=lambda: True,
    backend="neuron",
    cores="NEURON_RT_VISIBLE_CORES",
    core_per_rank=True,
    code="TORCH_NEURONX_NEFF_CACHE_DIR",
    folder="neff",
    # Running anything uncompiled is an error rather than slow, and no tensor is copied implicitly.
    environment={"TORCH_NEURONX_DISABLE_FALLBACK_EXECUTION": "1", "TORCH_NEURONX_DYNAMO_DISABLE_CPU_AUTOCOPY": "1"},
    only_graphs=True,
)
PLATFORMS = {platform.name: platform for platform in (CPU, CUDA, NEURON)}
DEVICES = ("auto", *PLATFORMS)
