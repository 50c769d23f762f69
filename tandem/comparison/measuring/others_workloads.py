"""Reads workloads that others publish, where the user has them: Spec-Bench's questions, Azure's arrivals."""

from __future__ import annotations

import csv
import json
from collections import defaultdict
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from tandem.comparison.measuring.workloads import Prompt

LEAST_ARRIVALS = 2


def spec_bench_prompts(
    path: Path, categories: Sequence[str] | None = None, per_category: int | None = None
) -> tuple[Prompt, ...]:
    """Returns the first `per_category` questions (None: all) of every category (None: of all), as the file has them.

    The file is Spec-Bench's question.jsonl. Of a question in two turns the first is asked. Raises ValueError, one line.
    """
    found = _questions(path)
    chosen = tuple(found) if categories is None else tuple(categories)
    if unknown := [each for each in chosen if each not in found]:
        raise ValueError(f"workloads: {unknown[0]!r} is not one of {', '.join(found)}")
    if per_category is not None and per_category < 1:
        raise ValueError(f"prompts-per-workload: {per_category} is below 1")
    return tuple(
        Prompt(f"{category}/{name}", category, text, chat=None)
        for category in chosen
        for name, text in found[category][:per_category]
    )


def _questions(path: Path) -> dict[str, list[tuple[str, str]]]:
    """The names and texts of the questions of every category."""
    found: defaultdict[str, list[tuple[str, str]]] = defaultdict(list)
    number = 0
    try:
        for line in path.read_text(encoding="utf-8").splitlines():
            number += 1
            asked = json.loads(line)
            text, category = asked["turns"][0], asked["category"]
            if not (isinstance(text, str) and text.strip() and isinstance(category, str)):
                raise ValueError("no text or no category")
            found[category].append((str(asked["question_id"]), text))
    except OSError as error:
        raise ValueError(f"spec-bench: {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, IndexError) as error:
        why = f"no {error}" if isinstance(error, KeyError) else error
        raise ValueError(f"spec-bench: {path}, line {number}: not a question of Spec-Bench: {why}") from None
    if not found:
        raise ValueError(f"spec-bench: {path}: it is empty")
    return dict(found)


def read_arrivals(path: Path) -> tuple[float, ...]:
    """Returns when the requests of a trace arrived, in seconds since its first one.

    The file is a CSV with a column TIMESTAMP, as AzureLLMInferenceTrace_*.csv. Raises ValueError, one line.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            times = sorted(_moment(row["TIMESTAMP"]).timestamp() for row in csv.DictReader(file))
    except OSError as error:
        raise ValueError(f"arrivals: {path}: {error.strerror}") from None
    except (KeyError, TypeError, ValueError, csv.Error) as error:
        why = "no column TIMESTAMP" if isinstance(error, KeyError) else error
        raise ValueError(f"arrivals: {path}: {why}") from None
    if len(times) < LEAST_ARRIVALS or times[-1] == times[0]:
        raise ValueError(f"arrivals: {path}: fewer than {LEAST_ARRIVALS} moments")
    return tuple(at - times[0] for at in times)


def _moment(text: str) -> datetime:
    """Parses a time stamp with any number of digits of a second, which Python before 3.11 does not take."""
    whole, _, fraction = text.partition(".")
    digits = fraction.partition("+")[0].rstrip("Z")[:6]
    return datetime.fromisoformat(f"{whole}+00:00").replace(microsecond=int(digits.ljust(6, "0")) if digits else 0)


def rescaled(recorded: Sequence[float], rate: float, count: int) -> tuple[float, ...]:
    """Returns the first `count` arrivals, the trace repeated if it has fewer, stretched to `rate` requests a second.

    Pauses and bursts keep their proportions.
    """
    lap = recorded[-1] * len(recorded) / (len(recorded) - 1)  # as long after the last one as between two on average
    at = [lap * (i // len(recorded)) + recorded[i % len(recorded)] for i in range(count)]
    mean = (at[-1] - at[0]) / (count - 1) if count > 1 else 0.0
    return tuple(each / (mean * rate) for each in at) if mean else tuple(at)
