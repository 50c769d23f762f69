"""Packs the results of a first hour without secrets, and finds answers with other tokens."""

from __future__ import annotations

import io
import json
import os
import re
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

from plans import HourPlan

FORMAT = "tandem-first-hour-1"  # read by tandem/comparison/measuring/bundle.py
MOST_BYTES = 32 * 2**20
TAKEN = (".json", ".jsonl", ".log", ".csv", ".md")
SECRET = re.compile(
    r"hf_\w{8,}|(?:AKIA|ASIA)\w{12,}|(?i:(?<=bearer )\S+)|(?i:(?<=token=)\S+)|(?i:(?<=secret=)\S+)|"
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?-----END [A-Z ]*PRIVATE KEY-----",
    re.DOTALL,
)


def without_secrets(text: str) -> str:
    """Removes what looks like a token or a key, and the name of the user's home."""
    home = os.path.expanduser("~")
    return SECRET.sub("(removed)", text).replace(home, "~") if len(home) > 1 else SECRET.sub("(removed)", text)


def keep_bundle(plan: HourPlan, folder: Path, state: dict[str, tuple[str, float]]) -> Path:
    """Writes FOLDER.tar.gz, or where there is room if its disk is full. Raises OSError."""
    name = f"{folder.name}.tar.gz"
    places = [folder.parent, Path(tempfile.gettempdir()), Path("/dev/shm")]
    for place in places[:-1]:
        try:
            return make_bundle(plan, folder, state, place / name)
        except OSError:
            (place / name).unlink(missing_ok=True)
    return make_bundle(plan, folder, state, places[-1] / name)


def make_bundle(plan: HourPlan, folder: Path, state: dict[str, tuple[str, float]], bundle: Path) -> Path:
    """Writes `bundle`: state, records, figures, logs and versions. No plots, weights, or environment."""
    about = {"format": FORMAT, "plan": plan.name, "pair": plan.pair, "steps": state}
    with tarfile.open(bundle, "w:gz") as packed:
        _put(packed, "about.json", json.dumps(about, indent=2))
        for file in sorted(folder.rglob("*")):
            if file.is_file() and file.suffix in TAKEN and file.stat().st_size <= MOST_BYTES:
                text = file.read_text(encoding="utf-8", errors="replace")
                _put(packed, str(file.relative_to(folder)), without_secrets(text))
    return bundle


def _put(packed: tarfile.TarFile, name: str, text: str) -> None:
    content = text.encode()
    member = tarfile.TarInfo(name)
    member.size = len(content)
    packed.addfile(member, io.BytesIO(content))


def differing(folder: Path) -> Iterator[str]:
    """A line for each architecture with other tokens than plain decoding's. Raises ValueError for other results."""
    file, compared = folder / "comparison.json", 0
    try:
        for condition in json.loads(file.read_text(encoding="utf-8"))["conditions"]:
            for figure in condition["summaries"]:
                name, same = figure["architecture"], figure["identical"]
                itself = name == "autoregressive" and condition["varies"] != "load"
                if same is None or itself:
                    continue
                compared += same["total"]
                if same["count"] < same["total"]:
                    counts = f"{same['count']} of {same['total']}"
                    yield f"{condition['name']}, {name}: {counts} answers are plain decoding's"
    except (OSError, KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{file}: is not the result of a comparison ({error})") from None
    if not compared:
        yield "no answer was compared with plain decoding's"
