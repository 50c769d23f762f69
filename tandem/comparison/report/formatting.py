"""Formats figures and names, the same in every format. A missing figure is a dash."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tandem.comparison.report.reading import JSON, PLAIN

MISSING = "–"


def known(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def number(value: float | None, digits: int = 2) -> str:
    return f"{value:.{digits}f}" if value is not None and math.isfinite(value) else MISSING


def milliseconds(seconds: float | None, digits: int = 1) -> str:
    return number(None if seconds is None else 1000 * seconds, digits)


def times(value: float | None) -> str:
    return f"{number(value)}×" if known(value) else MISSING


def percent(share: float | None, digits: int = 0, sign: bool = False) -> str:
    if share is None or not math.isfinite(share):
        return MISSING
    text = f"{100 * share:+.{digits}f} %" if sign else f"{100 * share:.{digits}f} %"
    return text.replace("-", "−")


def span(interval: Sequence[float] | None, scale: float = 1.0, digits: int = 2) -> str:
    """Formats an interval: '1.51 to 1.95'."""
    if interval is None or not all(map(math.isfinite, interval)):
        return MISSING
    low, high = interval
    return f"{scale * low:.{digits}f} to {scale * high:.{digits}f}".replace("-", "−")


def with_interval(text: str, interval: Sequence[float] | None, scale: float = 1.0, digits: int = 2) -> str:
    """Adds an interval: '1.72× (1.51 to 1.95)'."""
    spread = span(interval, scale, digits)
    return text if MISSING in (text, spread) else f"{text} ({spread})"


def name(architecture: str) -> str:
    """Returns the name of an architecture in tables and plots."""
    return architecture.replace("_", " ")


def name_in_sentence(architecture: str) -> str:
    """Returns the name of an architecture in a sentence."""
    return "plain decoding" if architecture in PLAIN else name(architecture)


def joined(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]


def plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def rtt(link: JSON) -> str:
    """Describes a link in a table or a panel."""
    if link["kind"] == "direct":
        return "direct" if not link["rtt_ms"] else f"{link['rtt_ms']:g} ms, direct"
    return f"{link['rtt_ms']:g} ms, emulated"


def link_phrase(link: JSON) -> str:
    """Describes a link in a sentence, including the preposition."""
    if link["kind"] == "direct" and not link["rtt_ms"]:
        return "on a direct link"
    return f"at RTT {link['rtt_ms']:g} ms" + ("" if link["kind"] == "direct" else " (emulated)")


def link_kind(kind: str) -> str:
    return {
        "direct": "direct: not emulated",
        "emulated": "emulated: a delay proxy on loopback",
        "netns": "emulated: tc-netem between network namespaces",
    }.get(kind, kind)


def sampling(sampling: JSON) -> str:
    """Describes sampling: 'greedy', or the temperature and the filters that are set."""
    if not sampling["temperature"]:
        return "greedy"
    parts = [f"temperature {sampling['temperature']:g}"]
    for key, neutral in (("top_k", 0), ("top_p", 1), ("min_p", 0)):
        if sampling[key] != neutral:
            parts.append(f"{key} {sampling[key]:g}")
    return ", ".join([*parts, f"seed {sampling['seed']}"])


def format_value(value: Any) -> str:
    """Formats any value of the settings on one line."""
    if value is None or value == {} or value == [] or value == "":
        return "not set"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}" if math.isfinite(value) else MISSING
    if isinstance(value, list | tuple):
        return ", ".join(format_value(item) for item in value)
    if isinstance(value, dict):
        return "; ".join(f"{key} {format_value(item)}" for key, item in value.items())
    return str(value)


def length(k: int | None) -> str:
    """Formats a speculation length; None is adaptive."""
    return "auto" if k is None else str(k)
