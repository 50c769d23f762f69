"""What `kubectl kustomize` makes of a folder, as far as ours go: resources, components, images, JSON patches.

For machines without kubectl; where there is one, a test compares the two.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

Object = dict[str, Any]
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml is ten times as fast
KNOWN = {"apiVersion", "kind", "resources", "components", "images", "patches"}


def build(folder: Path, objects: list[Object] | None = None) -> list[Object]:
    """A kustomization's objects; a component changes the given ones. Raises ValueError for what is not understood."""
    settings = yaml.load((folder / "kustomization.yaml").read_text(encoding="utf-8"), LOADER)
    if unknown := set(settings) - KNOWN:
        raise ValueError(f"{folder}: {sorted(unknown)} are not understood here")
    objects = [*(objects or ()), *(each for name in settings.get("resources", ()) for each in _resource(folder / name))]
    names = [(each["kind"], each["metadata"]["name"]) for each in objects]
    if len(set(names)) != len(names):
        raise ValueError(f"{folder}: an object is there twice in {names}")
    for component in settings.get("components", ()):
        objects = build(folder / component, objects)
    for patch in settings.get("patches", ()):
        _apply(patch, objects)
    for image in settings.get("images", ()):
        for container in containers(objects):
            name, _, tag = container["image"].rpartition(":")
            if name == image["name"]:
                container["image"] = f"{image.get('newName', name)}:{image.get('newTag', tag)}"
    return objects


def _resource(path: Path) -> list[Object]:
    if path.is_dir():
        return build(path)
    # By JSON: what an anchor names is copied for each use, since patches change one of them.
    return [json.loads(json.dumps(each)) for each in yaml.load_all(path.read_text(encoding="utf-8"), LOADER)]


def containers(objects: list[Object]) -> Iterator[Object]:
    """Init containers too."""
    for each in objects:
        for pod in pods_of(each).values():
            yield from pod["spec"].get("initContainers", ())
            yield from pod["spec"]["containers"]


def pods_of(each: Object) -> dict[str, Object]:
    """The pod template, by the object's name."""
    kinds = ("StatefulSet", "Deployment", "DaemonSet", "Job")
    return {each["metadata"]["name"]: each["spec"]["template"]} if each["kind"] in kinds else {}


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
