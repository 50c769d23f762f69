"""Reads what a first hour on a device sent back (deploy/first-hour), complete or not, without unpacking it."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

FORMAT = "tandem-first-hour-1"
MOST_BYTES = 32 * 2**20
RECORDS = ("measured/records.jsonl", "probe/records.jsonl")


def take(bundle: Path, name: str) -> str:
    """The text of a file in the bundle, by name. Raises ValueError."""
    try:
        with tarfile.open(bundle, "r:gz") as packed:
            member = packed.getmember(name)
            content = packed.extractfile(member) if member.isreg() and member.size <= MOST_BYTES else None
            if content is None:
                raise ValueError(f"{bundle}: {name} is no file of at most {MOST_BYTES} bytes")
            return content.read().decode()
    except (KeyError, OSError, EOFError, tarfile.TarError, UnicodeDecodeError) as error:
        raise ValueError(f"{bundle}: has no {name} that can be read ({error})") from None


def read_about(bundle: Path) -> dict[str, Any]:
    """Plan, pair, and each step's status and seconds. Raises ValueError."""
    text = take(bundle, "about.json")
    try:
        about = json.loads(text)
        steps = {str(name): (str(status), float(took)) for name, (status, took) in about["steps"].items()}
        if about["format"] == FORMAT:
            return {**about, "steps": steps}
    except (AttributeError, KeyError, TypeError, ValueError):
        pass  # refused below
    raise ValueError(f"{bundle}: about.json is not of format {FORMAT}")


def how_far(about: dict[str, Any]) -> str:
    """A line: each step taken, how it ended, and after how long."""
    steps = [f"{name} {status} ({took:.0f} s)" for name, (status, took) in about["steps"].items()]
    return f"{about.get('plan')} came this far: {', '.join(steps) or 'no step was taken'}"


def records_in(bundle: Path, folder: Path) -> Path:
    """Writes the bundle's measured records, or else the probe's, into `folder`. Raises ValueError."""
    for name in RECORDS:
        try:
            text = take(bundle, name)
        except ValueError:
            continue
        (folder / "records.jsonl").write_text(text, encoding="utf-8")
        return folder / "records.jsonl"
    raise ValueError(f"{bundle}: holds no records: nothing was measured")
