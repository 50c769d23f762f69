"""At most four pictures of a comparison, as HTML and SVG of any width, in the page's fonts and colors."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from tandem.comparison.analysis import words
from tandem.comparison.analysis.comparison import Comparison, Measured
from tandem.comparison.analysis.summary import Summary
from tandem.comparison.measuring.records import CAUSES

MARKERS = {  # for black and white; the page's style has the colors
    "autoregressive": "■",
    "autoregressive_width_1": "□",
    "lookup": "○",
    "distributed": "●",
    "distributed_head": "★",
    "fused": "◆",
    "remote_draft": "▲",
    "pipelined": "▼",
    "never_waiting": "◇",
}
HEIGHT = 240  # CSS pixels of a chart
LEAST = 1e-6  # ms; an axis is at least so long
WIDEST = 3.0  # an interval beyond this multiple of its mean is cut off
Lines = Mapping[tuple[str, bool], Sequence[tuple[float, ...]]]  # x, y and y's interval, by architecture and dashed


@dataclass(frozen=True, slots=True)
class Picture:
    title: str
    text: str
    markup: str  # trusted


def speed(found: Comparison) -> Picture | None:
    """Plots TPOT with its interval: the base's, or a strip per link if round trips are equal."""
    shown = found.links if _same_round_trip(found) else [found.base]
    strips = [m for m in shown if any(s.tpot_s for s in m.summaries)]
    if not strips:
        return None
    points = [_point(s) for m in strips for s in m.summaries if s.tpot_s is not None]
    ticks = _ticks(max(_end(point) for point in points))
    rows = "".join(
        (f"<b>{escape(words.link(m.link))}</b>" if len(strips) > 1 else "") + _dots(m, ticks[-1]) for m in strips
    )
    text = "Mean over all requests, measured at the client, and its 95 % interval; further left is faster."
    return Picture("Time per token", text, _rows(rows, ticks))


def _point(of: Summary) -> tuple[float, ...]:
    """Returns the mean TPOT in ms and, if known, the ends of its interval."""
    return tuple(1000 * each for each in (of.tpot_s or 0.0, *(of.tpot_interval or ())))


def _end(point: Sequence[float]) -> float:
    return min(max(point), WIDEST * point[0])


def _dots(measured: Measured, end: float) -> str:
    made = []
    for s in measured.summaries:
        if s.tpot_s is not None:
            mean, *interval = _point(s)
            low, high = interval or (mean, mean)
            ends = f"left:{_share(low, end)};right:calc(100% - {_share(high, end)})"
            line = f'<i class="interval {escape(s.architecture)}" style="{ends}"></i>'
            dot = f'<i style="left:{_share(mean, end)}">{_marker(s.architecture)}</i>'
            made.append(_row(s.architecture, line + dot, f"{mean:.2f}"))
    return "".join(made)


def by_round_trip(found: Comparison) -> Picture | None:
    """Plots TPOT by round trip; None for a single one."""
    if len(found.links) < 2 or _same_round_trip(found):
        return None
    lines = {
        (name, False): [(m.rtt_ms, *_point(s)) for m in found.links if (s := m.of(name)) and s.tpot_s is not None]
        for name in found.architectures
    }
    title, axis = "Time per token against round trip", "round trip between draft and target, ms"
    text = "Time per output token in ms. Lines join what was measured (bars: 95 % interval)."
    return Picture(title, text, _chart(title, axis, lines))


def by_cause(found: Comparison) -> Picture | None:
    shown = [s for s in found.base.summaries if any(s.milliseconds_per_token.values())]
    if not shown:
        return None
    totals = [sum(each or 0.0 for each in s.milliseconds_per_token.values()) for s in shown]
    ticks, used = _ticks(max(totals)), [c for c in CAUSES if any(s.milliseconds_per_token[c] for s in shown)]
    rows = []
    for s, total in zip(shown, totals, strict=True):
        widths = {cause: s.milliseconds_per_token[cause] or 0.0 for cause in used}
        parts = (
            f'<i class="cause {cause}" style="width:{_share(width, ticks[-1])}" title="{cause} {width:.2f} ms"></i>'
            for cause, width in widths.items()
        )
        rows.append(_row(s.architecture, "".join(parts), f"{total:.1f}"))
    legend = _legend(f'<i class="cause {cause}"></i> {cause}' for cause in used)
    text = "Milliseconds per output token, end to end. The causes of a bar add up to its whole time."
    if count := sum(s.overlapping for s in found.base.summaries):
        text += f" In {words.plural(count, 'request')} they overlap, and are scaled to it."
    return Picture("Where the milliseconds go", text, legend + _rows("".join(rows), ticks))


def under_load(found: Comparison) -> Picture | None:
    """Plots latency over throughput, a line per architecture, dashed for open loops."""
    lines: dict[tuple[str, bool], list[tuple[float, ...]]] = {}
    for m in found.loads:
        for s in m.summaries:
            rate, tpot = s.mean_output_throughput_token_per_s, s.distributions["tpot_s"].p50
            if m.load and rate and tpot is not None:
                lines.setdefault((s.architecture, m.load.rate is not None), []).append((rate, 1000 * tpot))
    if not lines:
        return None
    loads = words.joined([str(m.load) for m in found.loads])
    title, axis = "Latency against throughput", "output tokens per second, all requests together"
    text = f"Median time per token in ms; further right and lower is better. Points of a line, in order: {loads}."
    return Picture(title, text, _chart(title, axis, lines))


def _row(architecture: str, track: str, value: str) -> str:
    return f'<span>{escape(words.name(architecture))}</span><div class="track">{track}</div><span>{value}</span>'


def _rows(rows: str, ticks: Sequence[float]) -> str:
    axis = "".join(f'<i style="left:{_share(each, ticks[-1])}">{each:g}</i>' for each in ticks)
    return f'<div class="rows">{rows}<span></span><div class="track axis">{axis}</div><span>ms</span></div>'


def _chart(title: str, axis: str, lines: Lines) -> str:
    points = [point for of in lines.values() for point in of]
    xs = _ticks(max([point[0] for point in points], default=0.0))
    ys = _ticks(max([_end(point[1:]) for point in points], default=0.0))

    def at(x: float, y: float) -> tuple[str, str]:
        return _share(x, xs[-1]), f"{HEIGHT * (1 - min(y / ys[-1], 1.0)):.1f}"

    def line(x1: float, y1: float, x2: float, y2: float, style: str) -> str:
        (left, top), (right, bottom) = at(x1, y1), at(x2, y2)
        return f'<line x1="{left}" y1="{top}" x2="{right}" y2="{bottom}" {style}/>'

    def mark(x: float, y: float, sign: str, style: str = "") -> str:
        return '<text x="{}" y="{}" {}>{}</text>'.format(*at(x, y), style, sign)

    made = [line(0, y, xs[-1], y, 'class="grid"') + mark(0, y, f"{y:g}", 'class="left" dx="-8"') for y in ys]
    made += [mark(x, 0, f"{x:g}", 'dy="16"') for x in xs]
    made.append(f'<text x="50%" y="{HEIGHT + 36}">{axis}</text>')
    for (name, dashed), of in lines.items():
        style = f'class="{escape(name)}" stroke-width="2"' + (' stroke-dasharray="5 4"' if dashed else "")
        made += [line(x, y, next_x, next_y, style) for (x, y, *_), (next_x, next_y, *_) in itertools.pairwise(of)]
        made += [line(x, low, x, high, f'class="{escape(name)}"') for x, _, low, high in (p for p in of if p[2:])]
        made += [mark(x, y, MARKERS.get(name, "✖"), f'class="{escape(name)}"') for x, y, *_ in of]
    legend = _legend(
        f"{_marker(name)} {escape(words.name(name))}{', open' if dashed else ''}"
        for (name, dashed), of in lines.items()
        if of
    )
    label = f'role="img" aria-label="{escape(title)}"'
    return f'{legend}<svg class="chart" width="100%" height="{HEIGHT + 44}" {label}>{"".join(made)}</svg>'


def _legend(entries: Iterable[str]) -> str:
    return f'<ul class="legend">{"".join(f"<li>{each}</li>" for each in entries)}</ul>'


def _marker(architecture: str) -> str:
    return f'<span class="{escape(architecture)}">{MARKERS.get(architecture, "✖")}</span>'


def _share(value: float, end: float) -> str:
    return f"{100 * min(value / end, 1.0):.2f}%"


def _ticks(most: float) -> list[float]:
    """Returns three to six round numbers from 0 to `most` or more."""
    most = max(most, LEAST)
    power = 10.0 ** math.floor(math.log10(most / 2))
    step = next(power * each for each in (1, 2, 5, 10) if most <= 5 * power * each)
    return [step * i for i in range(math.ceil(most / step) + 1)]


def _same_round_trip(found: Comparison) -> bool:
    """Whether several links differ in something other than the round trip."""
    return len({m.rtt_ms for m in found.links}) < len(found.links)
