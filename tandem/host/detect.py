"""Detects Neuron software and devices without importing a model library."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from tandem.host.devices import Devices, find_devices
from tandem.host.instances import FAMILIES
from tandem.host.packages import Clash, Package, clashes, installed_packages, refusal, release, version_of

INDEX = "https://pip.repos.neuron.amazonaws.com"
TORCHNEURON_PIP = (
    'python -m pip install "torch-neuronx==2.14.*" "neuronx-cc==2.*" nki'
    f" --extra-index-url {INDEX} --extra-index-url https://download.pytorch.org/whl/cpu"
)
NXDI_NEEDS = ("torch-neuronx", "neuronx-cc", "neuronx-distributed", "neuronx-distributed-inference")
LAST_ON_TRN1 = (0, 8)
DOCTOR = "python main.py --role doctor says more"


class Stack(str, Enum):
    """The installed one of two incompatible stacks; both have a package torch-neuronx."""

    TORCHNEURON = "TorchNeuron"
    NXDI = "XLA torch-neuronx + NxD Inference"
    XLA = "XLA torch-neuronx without NxD Inference"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Neuron:
    stack: Stack
    packages: tuple[Package, ...]
    devices: Devices
    clashes: tuple[Clash, ...] = ()

    @property
    def placeholders(self) -> tuple[Package, ...]:
        return tuple(package for package in self.packages if package.placeholder)

    @property
    def trn1_or_inf2(self) -> bool:
        family = self.devices.family
        return family is not None and not FAMILIES[family].torchneuron


def detect(
    root: Path = Path("/"), path: Sequence[str] | None = None, environment: Mapping[str, str] | None = None
) -> Neuron:
    """Detects software and devices. The arguments are for tests."""
    packages = installed_packages(path)
    devices = find_devices(root, os.environ if environment is None else environment)
    return Neuron(_stack(packages), packages, devices, clashes(packages, path))


def _stack(packages: Sequence[Package]) -> Stack:
    torch = next((p for p in packages if p.name == "torch-neuronx" and not p.placeholder), None)
    if torch is None:
        return Stack.NONE
    if torch.native:
        return Stack.TORCHNEURON
    return Stack.NXDI if version_of(packages, "neuronx-distributed-inference") else Stack.XLA


def missing(backend: str, compile_only: bool = False, found: Neuron | None = None) -> str | None:
    """Why `neuron` (--device) or `nxdi` (--backend) cannot run here; None if it can.

    `compile_only`: needs no device. Raises ValueError for another name.
    """
    if backend not in ("neuron", "nxdi"):
        raise ValueError(f"backend: {backend!r} is neither neuron nor nxdi")
    found = found or detect()
    why = (_no_torchneuron(found) if backend == "neuron" else _no_nxdi(found)) or refusal(found.clashes)
    return why or (None if compile_only or found.devices.count else _no_device(found))


def _no_torchneuron(found: Neuron) -> str | None:
    if found.trn1_or_inf2:
        return f"TorchNeuron does not run on {found.devices.family}; use --backend nxdi with SDK 2.28.1"
    if found.stack is Stack.TORCHNEURON:
        return None if version_of(found.packages, "neuronx-cc") else _absent(found, ("neuronx-cc",))
    if found.stack is Stack.NONE:
        return _absent(found, ("torch-neuronx",))
    version = version_of(found.packages, "torch-neuronx")
    return (
        f"torch-neuronx {version} is the XLA package; TorchNeuron (SDK 2.33 or newer) needs an environment of its own"
    )


def _no_nxdi(found: Neuron) -> str | None:
    if found.stack is Stack.TORCHNEURON:
        return "this environment holds TorchNeuron; NxD Inference needs the XLA torch-neuronx in another environment"
    absent = [name for name in NXDI_NEEDS if version_of(found.packages, name) is None]
    if absent:
        return _absent(found, absent)
    version = version_of(found.packages, "neuronx-distributed-inference") or ""
    if found.trn1_or_inf2 and release(version) > LAST_ON_TRN1:
        return (
            f"neuronx-distributed-inference {version} does not support {found.devices.family};"
            " install that of SDK 2.28.1 (0.8.16251)"
        )
    return None


def _absent(found: Neuron, names: Sequence[str]) -> str:
    """The missing packages. Names placeholders, because installing those from PyPI seems to work."""
    fakes = [f"{p.name} {p.version}" for p in found.placeholders if p.name in names]
    if fakes:
        plural = "are placeholders" if len(fakes) > 1 else "is a placeholder"
        return f"{', '.join(fakes)} {plural} from PyPI; install AWS's own from {INDEX}"
    plural = "are" if len(names) > 1 else "is"
    return f"{', '.join(names)} {plural} not installed (AWS's index: {INDEX})"


def _no_device(found: Neuron) -> str:
    devices = found.devices
    if devices.problem:
        return f"there is no /dev/neuron*, {devices.problem}"
    if devices.instance and not devices.driver:
        return f"there is no /dev/neuron* on this {devices.instance}: the driver (aws-neuronx-dkms) is not loaded"
    return "there is no /dev/neuron*: this is not a Neuron instance, or a container without its devices"
