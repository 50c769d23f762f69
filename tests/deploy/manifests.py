"""The manifests of deploy/k8s as `kubectl kustomize` builds them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from kubernetes_validate import utils

ROOT = Path(__file__).resolve().parents[2]
K8S = ROOT / "deploy" / "k8s"
OVERLAYS = tuple(sorted(path.name for path in (K8S / "overlays").iterdir()))
BESIDE = ("cluster", "monitoring", "prometheus")
FOLDERS = (*BESIDE, *(f"overlays/{name}" for name in OVERLAYS))
OLDEST, NEWEST = "1.34", "1.37"  # DRA is v1 from 1.34 on
# It reads megabytes of definitions for each object.
utils.schema_contents = cache(utils.schema_contents)
UNKNOWN = ("NodePool", "EC2NodeClass", "PodMonitor")


@cache
def objects(folder: str) -> list[dict[str, Any]]:
    kubectl = shutil.which("kubectl") or pytest.skip("kubectl is absent")
    built = subprocess.run([kubectl, "kustomize", str(K8S / folder)], capture_output=True, text=True, timeout=60)
    assert built.returncode == 0, built.stderr
    return list(yaml.safe_load_all(built.stdout))


def containers(folder: str) -> Iterator[dict[str, Any]]:
    """Init containers too."""
    for pod in pods(folder).values():
        yield from pod["spec"].get("initContainers", ())
        yield from pod["spec"]["containers"]


def of_kind(folder: str, kind: str) -> dict[str, dict[str, Any]]:
    return {each["metadata"]["name"]: each for each in objects(folder) if each["kind"] == kind}


def pods(folder: str) -> dict[str, dict[str, Any]]:
    """Pod templates by the name of what has them."""
    kinds = ("StatefulSet", "Deployment", "DaemonSet", "Job")
    return {each["metadata"]["name"]: each["spec"]["template"] for each in objects(folder) if each["kind"] in kinds}


def values_of(folder: str) -> dict[str, str]:
    """The variables that a kubelet fills in: the ConfigMaps' values."""
    return {k: v for each in of_kind(folder, "ConfigMap").values() for k, v in each["data"].items()}


def filled(word: str, values: dict[str, str]) -> str:
    """$(NAME) as a kubelet does it."""
    return re.sub(r"\$\((\w+)\)", lambda match: values.get(match[1], match[0]), word)


def flags(container: dict[str, Any]) -> dict[str, str]:
    return dict(word.lstrip("-").partition("=")[::2] for word in container["args"])


def valid(each: dict[str, Any], version: str = OLDEST) -> None:
    """Strictly: an unknown field is an error. Kinds without a public schema are passed over."""
    if each["kind"] not in UNKNOWN:
        _valid(json.dumps(each), version)


@cache  # overlays share most objects
def _valid(written: str, version: str) -> None:
    kubernetes_validate.validate(json.loads(written), version, strict=True)
