"""Formats figures and names, the same in every format. A missing figure is a dash."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tandem.comparison.measuring.architectures import PLAIN
from tandem.comparison.report.reading import JSON

MISSING = "–"


def number(value: float | None, digits: int = 2) -> str:
    return f"{value:.{digits}f}" if value is not None and math.isfinite(value) else MISSING


def milliseconds(seconds: float | None, digits: int = 1) -> str:
    return number(None if seconds is None else 1000 * seconds, digits)


def ms(seconds: float | None, digits: int = 1) -> str:
    return f"{milliseconds(seconds, digits)} ms"


def times(value: float | None) -> str:
    text = number(value)
    return text if text == MISSING else f"{text}×"


def percent(share: float | None, digits: int = 0, sign: bool = False) -> str:
    if share is None or not math.isfinite(share):
        return MISSING
    return f"{100 * share:{'+' if sign else ''}.{digits}f} %".replace("-", "−")


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


def break_even(even_s: float, interval: Sequence[float] | None, seen_s: float | None, digits: int = 0) -> str:
    """States the round trip at which distributed decoding breaks even with plain decoding; seen: by measured times."""
    if even_s <= 0:
        return f"Distributed is predicted to beat plain decoding at no round trip ({ms(even_s, digits)})."
    spread = f" (95 % interval {span(interval, 1000, digits)} ms)" if interval else ""
    crossed = "" if seen_s is None else f"; measured, the two cross at {ms(seen_s, digits)}"
    return f"Distributed breaks even with plain decoding at {ms(even_s, digits)} RTT, predicted{spread}{crossed}."


def over_fused(seconds: float, digits: int = 1) -> str:
    """States what distributed decoding pays for being apart."""
    how = "more" if seconds >= 0 else "less"
    return f"Distributed pays {ms(abs(seconds), digits)} a token {how} than fused at the base link, measured."


def name(architecture: str) -> str:
    """Returns the name of an architecture or a workload in tables and plots."""
    return architecture.replace("_", " ")


def name_in_sentence(architecture: str) -> str:
    """Returns the name of an architecture in a sentence."""
    return "plain decoding" if architecture in PLAIN else name(architecture)


def joined(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]


def plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def capitalised(*sentences: str) -> str:
    return " ".join(sentence[:1].upper() + sentence[1:] for sentence in sentences)


def link(link: JSON) -> str:
    """Names an emulated link: 'RTT 20 ms, 50 Mbit/s'."""
    limit = link["bandwidth_mbps"]
    return f"RTT {link['rtt_ms']:g} ms" + ("" if limit is None else f", {limit:g} Mbit/s") + but(link)


def but(link: JSON) -> str:
    """What follows a round trip: in what an emulated link is not constant and symmetric; older files do not say."""
    return f", {link['but']}" if link.get("but") else ""


def rtt(link: JSON) -> str:
    """Describes a link in a table or a panel."""
    if link["kind"] == "direct":
        return "direct" if not link["rtt_ms"] else f"{link['rtt_ms']:g} ms, direct"
    return f"{link['rtt_ms']:g} ms{but(link)}, emulated"


def link_phrase(link: JSON) -> str:
    """Describes a link in a sentence, including the preposition."""
    if link["kind"] == "direct" and not link["rtt_ms"]:
        return "on a direct link"
    return f"at RTT {link['rtt_ms']:g} ms" + ("" if link["kind"] == "direct" else f"{but(link)} (emulated)")


def sampling(sampling: JSON) -> str:
    """Describes sampling: 'greedy', or the temperature and the filters that are set."""
    if not sampling["temperature"]:
        return "greedy"
    neutral = {"top_k": 0, "top_p": 1, "min_p": 0}
    filters = (f"{key} {sampling[key]:g}" for key, value in neutral.items() if sampling[key] != value)
    return ", ".join([f"temperature {sampling['temperature']:g}", *filters, f"seed {sampling['seed']}"])


def format_value(value: Any) -> str:
    """Formats any value of the settings on one line."""
    if value is None or value in ({}, [], ""):
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
