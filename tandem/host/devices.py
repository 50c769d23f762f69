"""Finds Neuron devices by /dev, sysfs, the driver, and neuron-ls if installed.

Formats: neuron-ls user guide (`neuron-ls --json-output`: one object per device; nc_count is logical cores, memory_size
bytes) and Neuron sysfs user guide. `root` stands for
in tests.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.host.instances import FAMILIES, family_of

TOOL = "opt/aws/neuron/bin/neuron-ls"
RUNTIME = "opt/aws/neuron/lib"
SYSFS = "sys/devices/virtual/neuron_device"
LNC_VARIABLES = ("NEURON_LOGICAL_NC_CONFIG", "NEURON_RT_VIRTUAL_CORE_SIZE")
SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class Devices:
    """Neuron devices; None: unknown.

    cores: logical, of all devices. memory_bytes: of one device. lnc: physical cores per logical one. visible:
    NEURON_RT_VISIBLE_CORES or NEURON_RT_NUM_CORES. busy: processes on cores, by neuron-ls.
    """

    count: int = 0
    instance: str | None = None
    family: str | None = None
    cores: int | None = None
    memory_bytes: int | None = None
    lnc: int | None = None
    driver: str | None = None
    runtime: str | None = None
    visible: str | None = None
    busy: tuple[str, ...] = ()
    problem: str = ""

    @property
    def core_bytes(self) -> int | None:
        if not (self.count and self.cores and self.memory_bytes):
            return None
        return self.memory_bytes * self.count // self.cores


def find_devices(root: Path, environment: Mapping[str, str]) -> Devices:
    """Finds devices; never raises. An unreadable value is None, a failing neuron-ls a `problem`."""
    nodes = [path for path in (root / "dev").glob("neuron*") if path.name[6:].isdecimal()]
    listed, problem = _neuron_ls(root, environment)
    instance = _text(listed, "instance_type") or _read(root / "sys/class/dmi/id/product_name")
    family = family_of(instance) or family_of(_chip_name(root))
    lnc = _number(listed, "logical_neuroncore_config") or _lnc(family, environment)
    return Devices(
        count=len(listed) or len(nodes),
        instance=instance if family_of(instance) else None,
        family=family,
        cores=sum(int(device.get("nc_count") or 0) for device in listed) or _cores(root, lnc),
        memory_bytes=_number(listed, "memory_size"),
        lnc=lnc,
        driver=_read(root / "sys/module/neuron/version"),
        runtime=_runtime(root),
        visible=environment.get("NEURON_RT_VISIBLE_CORES") or environment.get("NEURON_RT_NUM_CORES"),
        busy=_busy(listed),
        problem=problem,
    )


def _neuron_ls(root: Path, environment: Mapping[str, str]) -> tuple[list[dict[str, Any]], str]:
    """neuron-ls's devices, and its error."""
    tool = shutil.which("neuron-ls", path=environment.get("PATH", "")) or shutil.which(str(root / TOOL))
    if tool is None:
        return [], ""
    try:
        ran = subprocess.run(
            [tool, "--json-output"], capture_output=True, text=True, timeout=SECONDS, check=False, env=dict(environment)
        )
        listed = json.loads(ran.stdout)
    except (OSError, subprocess.SubprocessError) as error:
        return [], f"neuron-ls does not run: {error}"
    except ValueError:
        lines = (ran.stderr or ran.stdout).strip().splitlines()
        return [], f"neuron-ls finds no devices: {lines[0] if lines else f'exit code {ran.returncode}'}"
    if isinstance(listed, dict):
        listed = listed.get("neuron_devices", [])
    devices = listed if isinstance(listed, list) else []
    return [device for device in devices if isinstance(device, dict)], ""


def _text(listed: list[dict[str, Any]], key: str) -> str | None:
    return next((str(device[key]) for device in listed if device.get(key)), None)


def _number(listed: list[dict[str, Any]], key: str) -> int | None:
    return next((device[key] for device in listed if isinstance(device.get(key), int)), None)


def _busy(listed: list[dict[str, Any]]) -> tuple[str, ...]:
    holders = [process for device in listed for process in device.get("neuron_processes") or ()]
    named = (f"{process.get('pid')} {process.get('command', '')}".strip() for process in holders)
    return tuple(dict.fromkeys(named))


def _chip_name(root: Path) -> str | None:
    """The chip by sysfs: trn2 for Trainium2."""
    for path in sorted((root / SYSFS).glob("neuron*/info/architecture/device_name")):
        name = (_read(path) or "").lower()
        return name.replace("trainium", "trn").replace("inferentia", "inf")
    return None


def _cores(root: Path, lnc: int | None) -> int | None:
    """Logical cores, from sysfs's physical ones."""
    counts = [_read(path) or "" for path in (root / SYSFS).glob("neuron*/core_count")]
    physical = sum(int(count) for count in counts if count.isdecimal())
    return physical // (lnc or 1) or None


def _lnc(family: str | None, environment: Mapping[str, str]) -> int | None:
    """A process's logical core configuration: the variable's, else the chip's default."""
    for name in LNC_VARIABLES:
        if environment.get(name, "").isdecimal():
            return int(environment[name])
    return FAMILIES[family].lnc[0] if family else None


def _runtime(root: Path) -> str | None:
    """The runtime's version, from its file name: libnrt.so.2.35.30.0."""
    names = [path.name.removeprefix("libnrt.so.") for path in (root / RUNTIME).glob("libnrt.so.*.*")]
    return max(names, key=len) if names else None


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8").strip() or None
    except (OSError, UnicodeDecodeError):
        return None
