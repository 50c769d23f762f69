"""`--role doctor`: what is installed, which devices can serve, what to do next."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from tandem.host.detect import TORCHNEURON_PIP, Neuron, Stack, detect, missing
from tandem.host.host import Host, find_host
from tandem.host.packages import refusal, release
from tandem.installing import IN_A_CHECKOUT, install_command
from tandem.runners.native.compilation import cpu_features, prebuilt_library, sources_hash

NATIVE_BF16 = ("avx512_bf16", "amx_bf16", "bf16")
TORCHNEURON_PYTHONS = (3, 12)
NO_NATIVE = "none: there is neither a compiled library nor a C++ compiler"


@dataclass(frozen=True, slots=True)
class Findings:
    """`devices`: why each cannot serve; None: it can. `next`: what to do."""

    host: Host
    neuron: Neuron
    devices: dict[str, str | None]
    next: tuple[str, ...]
    native_steps: str


def examine(host: Host | None = None, neuron: Neuron | None = None, native: str | None = None) -> Findings:
    """Examines the machine. The arguments are for tests."""
    host, neuron = host or find_host(), neuron or detect()
    native = native or native_steps(host)
    devices = {
        "cpu": refusal(one for one in neuron.clashes if one.by == "Tandem") or _no_cpu(host, native),
        "cuda": _no_cuda(host),
        "neuron": missing("neuron", found=neuron),
        "nxdi": missing("nxdi", found=neuron),
    }
    return Findings(host, neuron, devices, tuple(_steps(host, neuron, devices, native)), native)


def native_steps(host: Host) -> str:
    """Origin of the native steps' library."""
    if ahead := prebuilt_library(sources_hash(), cpu_features()):
        return f"compiled already, for {ahead.name.partition('-')[0]}"
    return "compiled at the first start" if host.compiler else NO_NATIVE


def _no_cpu(host: Host, native: str) -> str | None:
    if "torch" in host.libraries:
        return None
    if native != NO_NATIVE:
        needs = f"tokenizers, which servers need, is not installed: {install_command('serve')}"
        return None if "tokenizers" in host.libraries else needs
    return f"there is neither a C++ compiler for native steps nor torch for module code: {install_command('serve')}"


def _no_cuda(host: Host) -> str | None:
    if not host.gpus:
        return "nvidia-smi finds no GPU"
    version = host.libraries.get("torch")
    if version is None:
        return "torch is not installed"
    return f"torch {version} is built for the CPU" if "+cpu" in version else None


def _steps(host: Host, neuron: Neuron, devices: dict[str, str | None], native: str) -> Iterator[str]:
    found = neuron.devices
    if neuron.placeholders:
        names = " ".join(package.name for package in neuron.placeholders)
        yield f"Remove PyPI's placeholders, which raise at import: python -m pip uninstall -y {names}"
    if neuron.clashes:
        wanted = dict.fromkeys(f"'{clash.name}{clash.wanted}'" for clash in neuron.clashes)
        yield f"Install the versions that are needed: python -m pip install {' '.join(wanted)}"
    if devices["neuron"] is None:
        yield "Plan, compile, serve on TorchNeuron: python main.py --role plan --help; docs/trainium.md"
    if devices["nxdi"] is None:
        yield "Plan, compile, serve on NxD Inference: python main.py --role plan --help; docs/trainium-nxdi.md"
    if found.count or found.instance:
        yield from _neuron_steps(host, neuron, devices)
    if devices["cuda"] is None:
        yield "Serve on the GPU: --device cuda"
    elif host.gpus:
        yield f"The GPU is not used ({devices['cuda']}): install a CUDA build of torch from https://pytorch.org"
    if native == NO_NATIVE:
        yield (
            "Install g++ or clang++ (or set CXX), or what is compiled already for x86-64 Linux: "
            f"{install_command('serve')}. Native steps are several times faster than module code"
        )
    elif devices["cpu"] is not None:
        yield f"Install what servers need: {install_command('serve')}"
    elif not (found.count or found.instance or host.gpus):
        start = "python main.py --role serve" if install_command("serve") == IN_A_CHECKOUT else "tandem serve"
        yield f"Serve on the CPU, nothing else is needed: {start}"


def _neuron_steps(host: Host, neuron: Neuron, devices: dict[str, str | None]) -> Iterator[str]:
    found = neuron.devices
    if found.instance and not found.count:
        yield "Load the Neuron driver: install aws-neuronx-dkms, or pass the devices on (docker --device=/dev/neuron0)"
    if neuron.stack is Stack.NONE and neuron.trn1_or_inf2:
        yield "Install NxD Inference of SDK 2.28.1, the last for Trn1 and Inf2: docs/trainium-nxdi.md"
    elif neuron.stack is Stack.NONE:
        yield f"Install TorchNeuron: {TORCHNEURON_PIP}"
        if release(host.python) < TORCHNEURON_PYTHONS:
            yield f"Use Python 3.12 to 3.14 for it: this is {host.python}, and SDK 2.33 has no wheel for that"
    elif devices["neuron"] is not None and devices["nxdi"] is not None:
        yield f"Neuron software is here but cannot serve: {devices['nxdi' if neuron.trn1_or_inf2 else 'neuron']}"
    if found.busy:
        yield (
            f"Cores are held by {len(found.busy)} other processes; give each its own with NEURON_RT_VISIBLE_CORES:"
            f" {'; '.join(found.busy[:3])}"
        )
    cores = found.cores
    if cores and found.visible is None:
        yield f"A process takes all {cores} cores unless NEURON_RT_VISIBLE_CORES says which (as in 0-{cores - 1})"


def finding_lines(findings: Findings) -> Iterator[str]:
    """The findings as a page's lines."""
    host = findings.host
    memory = f", {host.memory_bytes / 2**30:.0f} GiB" if host.memory_bytes else ""
    bf16 = (
        "multiplies bfloat16"
        if set(NATIVE_BF16) & {*host.features}
        else "no bfloat16 arithmetic: dtype auto is float32"
    )
    yield "Machine"
    yield f"  {host.processor}, {host.cores} cores{memory}, {host.system}, Python {host.python}"
    yield f"  instructions   {' '.join(host.features) or 'none that is relevant'} ({bf16})"
    yield f"  C++ compiler   {host.compiler or 'none'}"
    yield f"  native steps   {findings.native_steps}"
    yield f"  libraries      {', '.join(f'{name} {version}' for name, version in host.libraries.items())}"
    yield from (f"  clash          {one}" for one in findings.neuron.clashes)
    yield from (f"  GPU            {gpu}" for gpu in host.gpus)
    yield "Neuron"
    yield from _neuron_lines(findings.neuron)
    yield "Where models can run"
    for name, why in findings.devices.items():
        flag = f"--backend {name}" if name == "nxdi" else f"--device {name}"
        yield f"  {flag:16} {'yes' if why is None else f'no: {why}'}"
    yield "What to do next"
    yield from (f"  - {step}" for step in findings.next)


def _neuron_lines(neuron: Neuron) -> Iterator[str]:
    found = neuron.devices
    yield f"  software       {neuron.stack.value}"
    for package in neuron.packages:
        note = ": PyPI's placeholder, not the package" if package.placeholder else ""
        yield f"  package        {package.name} {package.version}{note}"
    yield f"  devices        {_device_words(neuron)}"
    if found.driver or found.runtime:
        yield f"  driver         {found.driver or 'not loaded'}; runtime library {found.runtime or 'not installed'}"
    if found.visible:
        yield f"  visible cores  {found.visible}"
    if found.problem:
        yield f"  problem        {found.problem}"


def _device_words(neuron: Neuron) -> str:
    found = neuron.devices
    if not found.count:
        return f"none; instance type {found.instance}" if found.instance else "none"
    where = f" of {found.instance}" if found.instance else f" ({found.family})" if found.family else ""
    cores = f", {found.cores} cores at LNC {found.lnc}" if found.cores else ""
    each = found.core_bytes
    memory = f", {each / 2**30:.0f} GiB a core" if each else ""
    return f"{found.count}{where}{cores}{memory}"


def run_doctor(as_json: bool = False) -> int:
    """Prints the findings; returns 0."""
    findings = examine()
    print(json.dumps(asdict(findings), indent=2) if as_json else "\n".join(finding_lines(findings)))
    return 0
