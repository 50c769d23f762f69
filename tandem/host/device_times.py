"""Step times of a model on a device, and their file (docs/rehearsal.md)."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

FORMAT = "tandem-step-times-1"
POINT = ("ms", "width", "rows", "length")


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
    """Measured steps, interpolated linearly.

    Between widths and rows if several of both were measured; else, and beyond the measured rows, by the step's tokens.
    Beyond the most tokens, the last two points' line continues; lengths beyond the measured ones count as the nearest.
    """

    points: tuple[StepTime, ...]

    def __post_init__(self) -> None:
        if not self.points:
            raise ValueError("no step is given")

    def seconds(self, width: int, rows: int = 1, length: int = 0) -> float:
        """Seconds of a step: `width` is the widest row's tokens, `length` the longest row's."""
        lengths = sorted({point.length for point in self.points})
        nearest = min(max(length, lengths[0]), lengths[-1])
        return _between(lengths, nearest, lambda at: self._at_length(at, width, rows)) / 1000

    def _at_length(self, length: int, width: int, rows: int) -> float:
        points = [point for point in self.points if point.length == length]
        counts = sorted({point.rows for point in points})
        if len(counts) > 1 and all(len({p.width for p in points if p.rows == each}) > 1 for each in counts):
            width = math.ceil(width * max(1.0, rows / counts[-1]))
            nearest = min(max(rows, counts[0]), counts[-1])
            return _between(counts, nearest, lambda at: _curve({p.width: p.ms for p in points if p.rows == at}, width))
        return _curve({point.tokens: point.ms for point in points}, width * rows)


def _curve(ms: Mapping[int, float], at: int) -> float:
    """A curve through `ms` at `at`: level before the first point, never falling after the last."""
    known = sorted(ms)
    if at <= known[0] or len(known) == 1:
        return ms[known[0]]
    if at <= known[-1]:
        return _between(known, at, ms.__getitem__)
    before, last = known[-2:]
    return ms[last] + max(0.0, (ms[last] - ms[before]) / (last - before)) * (at - last)


def _between(known: Sequence[int], at: int, value: Callable[[int], float]) -> float:
    """Interpolates between the neighbours of `at`, which is within `known`."""
    low = max(each for each in known if each <= at)
    high = min(each for each in known if each >= at)
    if low == high:
        return value(low)
    share = (at - low) / (high - low)
    return value(low) * (1 - share) + value(high) * share


@dataclass(frozen=True, slots=True)
class ModelTimes:
    """Steps of a target's verification, or of one draft token.

    `prefill`: steps of a prompt; None: as the others, by tokens.
    """

    model: str
    steps: StepTimes
    prefill: StepTimes | None = None

    @property
    def prefills(self) -> StepTimes:
        return self.prefill or self.steps


@dataclass(frozen=True, slots=True)
class DeviceTimes:
    """Step times of a target, a draft or both on `device`; None: measured on this machine.

    `source`: publication or measurement. `assumed`: parts that are neither.
    """

    name: str
    device: str
    source: str
    target: ModelTimes | None = None
    draft: ModelTimes | None = None
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


def _part_as_json(model: ModelTimes) -> dict[str, Any]:
    prefill = {"prefill": [asdict(point) for point in model.prefill.points]} if model.prefill else {}
    return {"model": model.model, "steps": [asdict(point) for point in model.steps.points], **prefill}


def read_times(path: Path) -> DeviceTimes:
    """Reads a file of step times. Raises ValueError, one line that names the key."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            raise ValueError(f'"format" is not "{FORMAT}"')
        known = {"format", "name", "device", "source", "assumed", "target", "draft"}
        if unknown := sorted(set(document) - known):
            raise ValueError(f"{unknown[0]!r} is not one of {', '.join(sorted(known))}")
        texts = {key: _text(document, key) for key in ("name", "device", "source", "assumed")}
        return DeviceTimes(
            **texts, target=_part(document.get("target"), "target"), draft=_part(document.get("draft"), "draft")
        )
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"{path}: {why}") from None


def _text(document: Mapping[str, Any], key: str) -> str:
    value = document.get(key, "")
    if not isinstance(value, str):
        raise ValueError(f"{key}: {value!r} is not a text")
    return value


def _part(given: Any, name: str) -> ModelTimes | None:
    if given is None:
        return None
    if not isinstance(given, dict) or set(given) - {"model", "steps", "prefill"}:
        raise ValueError(f"{name}: is not an object of model, steps and prefill")
    prefill = _points(given["prefill"], f"{name}: prefill") if given.get("prefill") else None
    return ModelTimes(_text(given, "model"), _points(given.get("steps"), f"{name}: steps"), prefill)


def _points(given: Any, where: str) -> StepTimes:
    if not isinstance(given, list):
        raise ValueError(f"{where}: is not a list")
    try:
        return StepTimes(tuple(_point(each) for each in given))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {error}") from None


def _point(given: Any) -> StepTime:
    if not isinstance(given, dict) or set(given) - set(POINT) or "ms" not in given:
        raise ValueError(f"{given!r} is not an object of ms, width, rows and length")
    for key in POINT[1:]:
        if key in given and (isinstance(given[key], bool) or not isinstance(given[key], int)):
            raise ValueError(f"{key}: {given[key]!r} is not a whole number")
    return StepTime(**given)
