"""Checks of a command of another program what this repository knows: files, folders, our own flags and routes."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

from tandem.cli import main as cli
from tests.deploy.manifests import objects

ROOT = Path(__file__).resolve().parents[2]
OTHERS = ("aws", "docker", "eksctl", "helm", "hf", "kubectl", "neuron-top", "pip", "sh", "source", "sudo")
ROUTES = ("/v1/completions", "/v1/chat/completions", "/v1/models", "/metrics")
FIELDS = {"model", "prompt", "messages", "max_tokens", "temperature", "stream"}


def check(words: list[str]) -> str:
    """Returns how a command was checked. Raises AssertionError for an unknown program or a thing that is not here."""
    if "|" in words:
        at = words.index("|")
        return f"{check(words[:at])} | {check(words[at + 1 :])}"
    if words[0] == "curl":
        return _curl(words[1:])
    assert words[0] in OTHERS, f"unknown command: {' '.join(words)}"
    if words[:2] == ["docker", "run"]:
        at = next(i for i, word in enumerate(words) if word.startswith("tandem:"))
        assert cli.parser().parse_args(words[words.index("main.py", at) + 1 :]).role
        return "our own flags"
    for folder in values(words, "-k"):
        assert objects(folder.removeprefix("deploy/k8s/")), folder
    files = [*values(words, "-f"), *values(words, "-r"), *values(words, "-c"), *words[1 : 2 * (words[0] == "sh")]]
    assert all((ROOT / file).is_file() for file in files), files
    return "files and folders are there"


def values(words: list[str], flag: str) -> list[str]:
    """The values of a flag, given as `--flag value` or `--flag=value`."""
    apart = [value for word, value in itertools.pairwise(words) if word == flag]
    return apart + [word.partition("=")[2] for word in words if word.startswith(f"{flag}=")]


def _curl(words: list[str]) -> str:
    url = next(word for word in words if re.match("https?://", word))
    assert "/" + url.partition("//")[2].partition("/")[2] in ROUTES, url
    assert ("--cacert" in words) == url.startswith("https:")
    if "-d" in words:
        assert {*json.loads(words[words.index("-d") + 1])} <= FIELDS
        assert words[words.index("-H") + 1] == "Content-Type: application/json"
    return "route and fields"
