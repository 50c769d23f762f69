"""Formats figures and names for page, terminal and sentences; a missing figure is a dash."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tandem.comparison.links.link_settings import LinkSettings
from tandem.comparison.measuring.architectures import PLAIN
from tandem.speculation.types import SamplingParams

MISSING = "–"


def number(value: float | None, digits: int = 2) -> str:
    return f"{value:.{digits}f}" if value is not None and math.isfinite(value) else MISSING


def milliseconds(seconds: float | None, digits: int = 1) -> str:
    return number(None if seconds is None else 1000 * seconds, digits)


def times(value: float | None) -> str:
    text = number(value)
    return text if text == MISSING else f"{text}×"


def span(interval: Sequence[float] | None, scale: float = 1.0, digits: int = 2) -> str:
    """Formats '1.51 to 1.95'."""
    if interval is None:
        return MISSING
    low, high = interval
    return f"{scale * low:.{digits}f} to {scale * high:.{digits}f}"


def with_interval(text: str, interval: Sequence[float] | None, scale: float = 1.0, digits: int = 2) -> str:
    """Formats '1.72× (1.51 to 1.95)'."""
    return text if MISSING in (text, span(interval)) else f"{text} ({span(interval, scale, digits)})"


def name(architecture: str) -> str:
    return architecture.replace("_", " ")


def name_in_sentence(architecture: str) -> str:
    return "plain decoding" if architecture in PLAIN else name(architecture)


def joined(parts: Sequence[str], last: str = "and") -> str:
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + f" {last} " + parts[-1]


def plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def capitalised(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:]


def link(link: LinkSettings) -> str:
    return "direct" if link.rtt_ms is None else str(link).removeprefix("RTT ")


def sampling(sampling: SamplingParams) -> str:
    """Formats 'greedy', or the temperature and filters."""
    if not sampling.temperature:
        return "greedy"
    neutral = {"top_k": 0, "top_p": 1, "min_p": 0}
    filters = (f"{key} {getattr(sampling, key):g}" for key, value in neutral.items() if getattr(sampling, key) != value)
    return ", ".join([f"temperature {sampling.temperature:g}", *filters, f"seed {sampling.seed}"])
