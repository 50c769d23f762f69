"""Packs the results of a first hour without secrets, and adds a bundle to the table of devices."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from plans import Plan

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tandem.comparison.measuring.bundle import FORMAT, MOST_BYTES, how_far, read_about

TAKEN = (".json", ".jsonl", ".log", ".csv", ".md")
SECRET = re.compile(
    r"hf_\w{8,}|(?:AKIA|ASIA)\w{12,}|(?i:(?<=bearer )\S+)|(?i:(?<=token=)\S+)|(?i:(?<=secret=)\S+)|"
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?-----END [A-Z ]*PRIVATE KEY-----",
    re.DOTALL,
)
COLUMNS = "device | pair | software | plain | fused | distributed 0 / 20 / 50 ms | never waiting 0 / 20 / 50 ms"
COLUMNS += " | identical | bits equal in all shapes | commit"
HEAD = f"""# Devices

Each row is a bundle that came back, added by `python deploy/first-hour/first_hour.py add BUNDLE.tar.gz`. Figures are
means of ms a token at the client, over an emulated link of the round trip given; `identical`: answers with plain
decoding's tokens.

| {COLUMNS} |
|{"---|" * (COLUMNS.count("|") + 1)}
"""


def without_secrets(text: str) -> str:
    """Removes what looks like a token or a key, and the name of the user's home."""
    home = os.path.expanduser("~")
    return SECRET.sub("(removed)", text).replace(home, "~") if len(home) > 1 else SECRET.sub("(removed)", text)


def keep_bundle(plan: Plan, folder: Path, state: dict[str, Any]) -> Path:
    """Writes FOLDER.tar.gz, or where there is room if its disk is full. Raises OSError."""
    name = f"{folder.name}.tar.gz"
    places = [folder.parent, Path(tempfile.gettempdir()), Path("/dev/shm")]
    for place in places[:-1]:
        try:
            return make_bundle(plan, folder, state, place / name)
        except OSError:
            (place / name).unlink(missing_ok=True)
    return make_bundle(plan, folder, state, places[-1] / name)


def make_bundle(plan: Plan, folder: Path, state: dict[str, Any], bundle: Path) -> Path:
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


def add_bundle(bundle: Path, table: Path) -> str:
    """Analyses a bundle's records anew and adds its row to the table. Returns the row. Raises ValueError.

    A bundle whose steps are not all done gets no row: returns how far it came.
    """
    about = read_about(bundle)
    if not all(step["status"] == "done" for step in about["steps"].values()):
        return how_far(about)
    with tempfile.TemporaryDirectory() as scratch:
        command = ["compare_architectures.py", "--from-records", str(bundle), "--output-dir", scratch]
        done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=False)
        if not (Path(scratch) / "comparison.json").is_file():
            raise ValueError(f"{bundle}: compare --from-records refused its records: {done.stderr.strip()[-500:]}")
        figures = json.loads((Path(scratch) / "comparison.json").read_text(encoding="utf-8"))
    row = "| " + " | ".join(str(cell).replace("|", "/") for cell in _cells(about, figures)) + " |"
    text = table.read_text(encoding="utf-8") if table.exists() else HEAD
    if row not in text:
        table.write_text(text + row + "\n", encoding="utf-8")
    return row


def _cells(about: dict[str, Any], figures: dict[str, Any]) -> Iterator[str]:
    models = {each["architecture"]["name"]: each["model"] for each in figures["endpoints"]}
    model = models["autoregressive"]
    yield f"{about.get('plan')} ({model['device']})"
    yield f"{about.get('pair')}, {model['dtype']}"
    packages = figures["versions"]["packages"]
    yield ", ".join(
        f"{name} {packages[name]}" for name in ("torch", "torch-neuronx", "neuronx-cc") if packages.get(name)
    )
    at = {
        c["link"]["rtt_ms"] or 0.0: {one["architecture"]: one for one in c["summaries"]}
        for c in figures["conditions"]
        if c["varies"] in ("base", "link")
    }
    yield _ms(at, 0.0, "autoregressive")
    yield _ms(at, 0.0, "fused")
    for architecture in ("distributed", "never_waiting"):
        yield " / ".join(_ms(at, rtt, architecture) for rtt in (0.0, 20.0, 50.0))
    others = [one for each in at.values() for name, one in each.items() if name != "autoregressive"]
    counted = [same for one in others if (same := one["identical"])]
    yield f"{sum(one['count'] for one in counted)} of {sum(one['total'] for one in counted)}"
    yield ", ".join(sorted({str(each["bit_exact"]).lower() for each in models.values()}))
    yield str(figures["versions"].get("git_commit", "unknown"))


def _ms(at: dict[float, dict[str, Any]], rtt: float, architecture: str) -> str:
    seconds = at.get(rtt, {}).get(architecture, {}).get("distributions", {}).get("tpot_s", {}).get("mean")
    return "-" if seconds is None else f"{1000 * seconds:.1f}"


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
