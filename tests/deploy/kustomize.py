"""What `kubectl kustomize` makes of a folder, as far as ours go: resources, images, JSON patches. All else is an error.

For machines without kubectl. Where there is one, a test compares the two.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml

Object = dict[str, Any]
PREDICTOR = ("labels", "minReplicas", "timeout", "deploymentStrategy")
"""Fields of a KServe predictor that are not its pod's."""
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml is ten times as fast
KNOWN = {"apiVersion", "kind", "resources", "images", "patches"}


def build(folder: Path) -> list[Object]:
    """Every object of a kustomization. Raises ValueError for what is not understood."""
    settings = yaml.load((folder / "kustomization.yaml").read_text(encoding="utf-8"), LOADER)
    if unknown := set(settings) - KNOWN:
        raise ValueError(f"{folder}: {sorted(unknown)} are not understood here")
    objects = [each for name in settings["resources"] for each in _resource(folder / name)]
    names = [(each["kind"], each["metadata"]["name"]) for each in objects]
    if len(set(names)) != len(names):
        raise ValueError(f"{folder}: an object is there twice in {names}")
    for patch in settings.get("patches", ()):
        _apply(patch, objects)
    for image in settings.get("images", ()):
        for container in containers(objects):
            if container["image"] == image["name"]:
                container["image"] = f"{image['newName']}:{image['newTag']}"
    return objects


def _resource(path: Path) -> list[Object]:
    if path.is_dir():
        return build(path)
    objects: list[Object] = pickle.loads(_parsed(path.resolve()))
    return objects


@cache  # overlays share most files
def _parsed(path: Path) -> bytes:
    return pickle.dumps([each for each in yaml.load_all(path.read_text(encoding="utf-8"), LOADER) if each])


def containers(objects: list[Object]) -> Iterator[Object]:
    """Init containers too."""
    for each in objects:
        for pod in pods_of(each).values():
            yield from pod["spec"].get("initContainers", ())
            yield from pod["spec"]["containers"]


def pods_of(each: Object) -> dict[str, Object]:
    """The pod templates of what has some, by its name; that of a LeaderWorkerSet's workers by "NAME worker"."""
    spec, name = each.get("spec", {}), each["metadata"]["name"]
    if each["kind"] == "InferenceService":
        predictor = spec["predictor"]
        inside = {field: value for field, value in predictor.items() if field not in PREDICTOR}
        return {name: {"metadata": {"labels": predictor["labels"]}, "spec": inside}}
    if each["kind"] == "LeaderWorkerSet":
        group = spec["leaderWorkerTemplate"]
        return {name: group["leaderTemplate"], f"{name} worker": group["workerTemplate"]}
    return {name: spec["template"]} if each["kind"] in ("StatefulSet", "Deployment", "DaemonSet", "Job") else {}


def _apply(patch: Object, objects: list[Object]) -> None:
    target = patch["target"]
    found = [o for o in objects if (o["kind"], o["metadata"]["name"]) == (target["kind"], target["name"])]
    if len(found) != 1 or set(target) != {"kind", "name"} or set(patch) != {"target", "patch"}:
        raise ValueError(f"patch of {target}: {len(found)} objects")
    for operation in yaml.load(patch["patch"], LOADER):
        _operate(operation, found[0])


def _operate(operation: Object, target: Object) -> None:
    """RFC 6902: add, replace, remove, with members and indices that exist but for the last of `add`, `-` at the end."""
    steps = operation["path"].lstrip("/").split("/")
    *path, last = (step.replace("~1", "/").replace("~0", "~") for step in steps)  # RFC 6901
    place: Any = target
    for step in path:
        place = place[int(step)] if isinstance(place, list) else place[step]
    if last == "-" and operation["op"] == "add":
        place.append(copy.deepcopy(operation["value"]))
        return
    key: Any = int(last) if isinstance(place, list) else last
    known = key < len(place) if isinstance(place, list) else key in place
    if operation["op"] not in ("add", "replace", "remove") or (operation["op"] != "add") != known:
        raise ValueError(f"{operation['op']} {operation['path']}: not understood here")
    if operation["op"] == "remove":
        del place[key]
        return
    place[key] = copy.deepcopy(operation["value"])
