"""Machines and package folders made up for tests, and the public models' configurations."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from tandem.host.instances import instance_named
from tandem.workshops.planning.plan import Pair, PlanConfig, pair_of

CONFIGS = Path(__file__).parent / "configs"
WRONG = "WRONG PACKAGE. Please install the package from Neuron Repository - pip.repos.neuron.amazonaws.com"
XLA = {"torch-neuronx": "2.9.0.2.12.22436", "torch-xla": "2.9.0", "libneuronxla": "2.2.1", "neuronx-cc": "2.23.6484.0"}
NXDI = {**XLA, "neuronx-distributed": "0.17.26814", "neuronx-distributed-inference": "0.8.16251"}
TORCHNEURON = {"torch-neuronx": "2.14.3.0.1", "neuronx-cc": "2.28.7631.0", "nki": "0.7.0"}
PLACEHOLDERS = {"torch-neuronx": "1.0", "neuronx-cc": "1.0.post1", "neuronx-distributed-inference": "0.1.0"}


def model(name: str) -> str:
    return str(CONFIGS / name)


def planned(instance: str, target: str, draft: str | None = None, **settings: object) -> Pair:
    config = PlanConfig(instance, model(target), model(draft) if draft else None, **settings)  # type: ignore[arg-type]
    return pair_of(config, instance_named(instance))


def site(
    folder: Path,
    packages: dict[str, str],
    *,
    placeholders: bool = False,
    needs: dict[str, tuple[str, ...]] | None = None,
) -> list[str]:
    """A package path with these distributions, AWS's or PyPI's, and what they need."""
    for name, version in packages.items():
        info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        body = f"\n\n{WRONG}\n" if placeholders else "\n\nA package.\n"
        head = [f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {n}" for n in (needs or {}).get(name, ()))]
        (info / "METADATA").write_text("Metadata-Version: 2.1\n" + "\n".join(head) + body)
    return [str(folder)]


def neuron_ls(root: Path, *, says: object = None, prints: str = "", code: int = 0) -> None:
    """A stand-in for /opt/aws/neuron/bin/neuron-ls."""
    tool = root / "opt/aws/neuron/bin/neuron-ls"
    tool.parent.mkdir(parents=True, exist_ok=True)
    out = prints or json.dumps(says)
    tool.write_text(f"#!{sys.executable}\nimport sys\nassert sys.argv[1:] == ['--json-output']\n")
    with tool.open("a") as file:
        file.write(f"print({out!r})\nsys.exit({code})\n")
    tool.chmod(0o755)


def device(number: int, instance: str, cores: int, memory: int, lnc: int | None, **more: object) -> dict[str, object]:
    """One device as `neuron-ls --json-output` prints it."""
    said: dict[str, object] = {
        "instance_type": instance,
        "neuron_device": number,
        "bdf": f"0000:{number:02x}:00.0",
        "connected_to": None,
        "nc_count": cores,
        "memory_size": memory,
        "neuroncore_ids": list(range(number * cores, (number + 1) * cores)),
        "neuron_processes": [],
    }
    return {**said, **({"logical_neuroncore_config": lnc} if lnc else {}), **more}


def machine(root: Path, instance: str | None = None, nodes: int = 0, driver: str | None = None) -> Path:
    """A file system of an instance: its name, device nodes, driver."""
    (root / "dev").mkdir(parents=True, exist_ok=True)
    for number in range(nodes):
        (root / f"dev/neuron{number}").touch()
    for path, text in (("sys/class/dmi/id/product_name", instance), ("sys/module/neuron/version", driver)):
        if text is not None:
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(text + "\n")
    return root


EMPTY_ENVIRONMENT = {"PATH": os.devnull}
