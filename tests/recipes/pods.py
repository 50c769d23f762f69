"""Starts the containers of an overlay that a curl command through its gateway needs, as the manifests have them.

NxD Inference is its stand-in, models are small ones; certificates and tokens are those that the page made.
"""

from __future__ import annotations

import sys

from tests.deploy.starting import PORTS, Container, containers, here
from tests.recipes import models
from tests.recipes.page import ROOT
from tests.recipes.place import Place

FOLDERS = ("compiled_dir", "artifacts")


def start(place: Place, overlay: str) -> None:
    """Starts the target, and the pod with the gateway in front of it."""
    target = next(each for each in containers(overlay, "StatefulSet") if each.flags["role"] == "target")
    worker, gateway = containers(overlay, "Deployment")
    address = f"127.0.0.1:{_serve(place, target)['port']}"
    engine = _serve(place, worker, target_host=address)["engine_port"]
    _serve(place, gateway, workers=f"127.0.0.1:{engine}")


def _serve(place: Place, container: Container, **replaced: str) -> dict[str, str]:
    """Starts a container; returns its ports. The gateway's is the one that the page forwards."""
    flags = container.flags
    own = {name: f"{flags['role']} {flags[name]}" for name in PORTS if name in flags}
    ports = {name: place.port(flags[name] if name == "http_port" else key) for name, key in own.items()}
    if "target_model" in flags:
        name = flags["target_model"].rpartition("/")[2]
        replaced["target_model"] = str(models.write(place.folder / "models" / name))
    replaced |= {name: str(place.folder / name) for name in FOLDERS if name in flags}
    words = here(container.arguments, place.folder / "secrets", {k: int(v) for k, v in ports.items()}, **replaced)
    split = [part for word in words for part in word.split("=", 1)]  # the stand-in is chosen by a word of its own
    place.serve([sys.executable, str(ROOT / "main.py"), *split], {}, ports.get("http_port", ports.get("port", "")))
    return ports
