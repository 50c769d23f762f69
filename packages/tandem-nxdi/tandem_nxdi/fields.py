"""Field names of NxD Inference's configurations, which ignores unknown ones with a warning.

From the keywords of `__init__` in NxDI 0.9.0 (4bcdc54, models/config.py); a test compares them with the source if
there.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any


@cache
def names() -> dict[str, Any]:
    """Field names by configuration; `elsewhere`: other software's, with Tandem's equivalent."""
    found: dict[str, Any] = json.loads(Path(__file__).with_name("fields.json").read_text(encoding="utf-8"))
    return found


_NESTED = ("on_device_sampling_config", "kv_quant_config", "lora_config")


def check_names(given: Mapping[str, Any], field: str = "neuron_config") -> None:
    """Raises ValueError, with the nearest name, for a name unknown to NxDI, also in nested configurations."""
    _check(given, [*names()["neuron"], *names()["mixture_of_experts"]], field)
    for name in _NESTED:
        nested = given.get(name)
        if nested is None:
            continue
        if not isinstance(nested, Mapping):
            raise ValueError(f"{field}: {name} is {nested!r}, not an object of fields")
        _check(nested, names()[name], f"{field}: {name}")


def _check(given: Iterable[str], known: Sequence[str], field: str) -> None:
    for name in given:
        if name not in known and name in names()["elsewhere"]:
            raise ValueError(f"{field}: NxD Inference has no field {name!r}: {names()['elsewhere'][name]}")
        if name not in known:
            cutoff = 0.5 if len(known) < 50 else 0.75  # among many names, one of another thing is always half as alike
            near = difflib.get_close_matches(name, known, n=1, cutoff=cutoff)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(f"{field}: NxD Inference has no field {name!r}{hint}")
