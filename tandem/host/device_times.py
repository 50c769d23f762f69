"""Step times of a model on a device, and their file (docs/comparison.md)."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

FORMAT = "tandem-step-times-1"
PUBLISHED = Path(__file__).with_name("step_times")


@dataclass(frozen=True, slots=True)
class StepTime:
    """Milliseconds of a step over the last `width` tokens of `rows` sequences of `length` tokens; length 0: any."""

    ms: float
    width: int = 1
    rows: int = 1
    length: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.ms) and self.ms > 0):
            raise ValueError(f"ms: {self.ms} is not a finite number above 0")
        for name, least in (("width", 1), ("rows", 1), ("length", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}: {getattr(self, name)} is below {least}")

    @property
    def tokens(self) -> int:
        return self.width * self.rows


@dataclass(frozen=True, slots=True)
class StepTimes:
    """A model's steps, interpolated linearly. `prefill`: steps of a prompt; None: as the others, by tokens.

    Between widths and rows if several of both were measured; else, and beyond the measured rows, by the step's tokens.
    Beyond the most tokens, the last two points' line continues; lengths beyond the measured ones count as the nearest.
    """

    points: tuple[StepTime, ...]
    model: str = ""
    prefill: StepTimes | None = None

    def __post_init__(self) -> None:
        if not self.points:
            raise ValueError("steps: no step is given")

    def seconds(self, width: int, rows: int = 1, length: int = 0) -> float:
        """Seconds of a step: `width` is the widest row's tokens, `length` the longest row's."""
        lengths = {point.length for point in self.points}
        return _between({at: self._at_length(at, width, rows) for at in lengths}, length) / 1000

    def _at_length(self, length: int, width: int, rows: int) -> float:
        points = [point for point in self.points if point.length == length]
        counts = {point.rows for point in points}
        if len(counts) > 1 and all(len({p.width for p in points if p.rows == each}) > 1 for each in counts):
            width = math.ceil(width * max(1.0, rows / max(counts)))
            return _between({at: _curve({p.width: p.ms for p in points if p.rows == at}, width) for at in counts}, rows)
        return _curve({point.tokens: point.ms for point in points}, width * rows)


def _curve(ms: Mapping[int, float], at: int) -> float:
    """A curve through `ms` at `at`: level before the first point, never falling after the last."""
    if len(ms) == 1 or at <= max(ms):
        return _between(ms, at)
    before, last = sorted(ms)[-2:]
    return ms[last] + max(0.0, (ms[last] - ms[before]) / (last - before)) * (at - last)


def _between(values: Mapping[int, float], at: int) -> float:
    """Interpolates between the neighbours of `at`; beyond the ends, the nearest."""
    at = min(max(at, min(values)), max(values))
    low, high = max(each for each in values if each <= at), min(each for each in values if each >= at)
    share = (at - low) / (high - low) if low < high else 0.0
    return values[low] * (1 - share) + values[high] * share


@dataclass(frozen=True, slots=True)
class DeviceTimes:
    """Steps of a target's verification, of one draft token, or of both on `device`; None: measured on this machine.

    `source`: publication or measurement. `assumed`: parts that are neither.
    """

    name: str
    device: str
    source: str
    target: StepTimes | None = None
    draft: StepTimes | None = None
    assumed: str = ""

    def __post_init__(self) -> None:
        for field in ("name", "device", "source"):
            if not getattr(self, field):
                raise ValueError(f"{field}: is empty; a rehearsal says whose times it takes and where they are from")
        if not (self.target or self.draft):
            raise ValueError("neither target nor draft has step times")


def text_of(times: DeviceTimes) -> str:
    """The file's text."""
    parts = {part: _part_as_json(model) for part in ("target", "draft") if (model := getattr(times, part))}
    head = {"format": FORMAT, "name": times.name, "device": times.device, "source": times.source}
    return json.dumps({**head, "assumed": times.assumed, **parts}, indent=1, ensure_ascii=False) + "\n"


def _part_as_json(steps: StepTimes) -> dict[str, Any]:
    prefill = {"prefill": [asdict(point) for point in steps.prefill.points]} if steps.prefill else {}
    return {"model": steps.model, "steps": [asdict(point) for point in steps.points], **prefill}


def presets() -> tuple[str, ...]:
    """Names of the published step times, files in step_times/ with their sources."""
    return tuple(sorted(file.stem for file in PUBLISHED.glob("*.json")))


def times_named(given: str) -> DeviceTimes:
    """Step times of a preset or file. Raises ValueError, one line."""
    preset = given in presets()
    if not preset and not Path(given).is_file():
        raise ValueError(f"rehearse: {given!r} is neither a file nor one of {', '.join(presets())}")
    try:
        return read_times(PUBLISHED / f"{given}.json" if preset else Path(given))
    except ValueError as error:
        raise ValueError(f"rehearse: {error}") from None


def read_times(path: Path) -> DeviceTimes:
    """Reads a file of step times. Raises ValueError, one line that names the key."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(document, dict) or document.pop("format", None) != FORMAT:
            raise ValueError(f'"format" is not "{FORMAT}"')
        parts = {part: _part(document.pop(part, None), part) for part in ("target", "draft")}
        _check(document, dict.fromkeys(("assumed", "device", "draft", "name", "source", "target"), str))
        named: dict[str, Any] = {"name": "", "device": "", "source": ""} | document
        return DeviceTimes(**named, target=parts["target"], draft=parts["draft"])
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"{path}: {why}") from None


_KINDS = {str: "a text", int: "a whole number", float: "a number", list: "a list"}


def _check(given: Any, kinds: Mapping[str, type], needed: str = "") -> None:
    if not isinstance(given, dict) or (needed and needed not in given):
        raise ValueError(f"{given!r} is not an object of {', '.join(kinds)}")
    for key, value in given.items():
        if key not in kinds:
            raise ValueError(f"{key!r} is not one of {', '.join(kinds)}")
        if type(value) is not kinds[key] and (kinds[key], type(value)) != (float, int):
            raise ValueError(f"{key}: {value!r} is not {_KINDS[kinds[key]]}")


def _part(given: Any, name: str) -> StepTimes | None:
    if given is None:
        return None
    try:
        _check(given, {"model": str, "steps": list, "prefill": list}, needed="steps")
        prefill = StepTimes(_points(given["prefill"], "prefill")) if given.get("prefill") else None
        return StepTimes(_points(given["steps"], "steps"), given.get("model", ""), prefill)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _points(given: list[Any], where: str) -> tuple[StepTime, ...]:
    try:
        for each in given:
            _check(each, {"ms": float, "width": int, "rows": int, "length": int}, needed="ms")
        return tuple(StepTime(**each) for each in given)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
