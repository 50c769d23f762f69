"""Fails if answers of a comparison have other tokens than plain decoding's: same_tokens.py RESULTS."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def differing(figures: Any) -> Iterator[str]:
    """A line for each architecture with answers that differ. Raises KeyError or TypeError for other figures."""
    compared = 0
    for condition in figures["conditions"]:
        for figure in condition["summaries"]:
            name, same = figure["architecture"], figure["identical"]
            itself = name == "autoregressive" and condition["varies"] != "load"
            if same is None or itself:
                continue
            compared += same["total"]
            if same["count"] < same["total"]:
                yield f"{condition['name']}, {name}: {same['count']} of {same['total']} answers are plain decoding's"
    if not compared:
        yield "no answer was compared with plain decoding's"


def main(folder: Path) -> int:
    """Prints what differs. Returns 0 if nothing does, 1 if something does, 2 if there are no results."""
    file = folder / "comparison.json"
    try:
        found = list(differing(json.loads(file.read_text(encoding="utf-8"))))
    except (OSError, KeyError, TypeError, AttributeError, ValueError) as error:
        print(f"same_tokens.py: {file}: is not the result of a comparison ({error})", file=sys.stderr)
        return 2
    print("\n".join(found) or "every answer has plain decoding's tokens")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
