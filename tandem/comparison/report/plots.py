"""At most four pictures of a comparison, as SVG in the page's fonts and colors. Imports matplotlib on use."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any, Literal

from tandem.comparison.analysis import words
from tandem.comparison.analysis.comparison import Comparison, Measured
from tandem.comparison.measuring.records import CAUSES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 6.0
INK, QUIET, RULE, PAPER = "#1d1d21", "#66666e", "#d7d7dc", "#fefefe"
LOOKS = {  # colors after Okabe and Ito; markers for black and white
    "autoregressive": ("#5f6570", "s"),
    "autoregressive_width_1": ("#8b919c", "P"),
    "lookup": ("#9b2d5e", "<"),
    "distributed": ("#0b6fb3", "o"),
    "distributed_head": ("#5b53b5", "p"),
    "fused": ("#cf5a0a", "D"),
    "remote_draft": ("#0a8f6c", "^"),
    "pipelined": ("#a8558c", "v"),
    "never_waiting": ("#7a6a00", ">"),
    "openai": ("#3d3d44", "h"),
}
CAUSE_COLORS = dict(zip(CAUSES, ("#8fa3bd", "#4a5568", "#7d6b91", "#e0a21b", "#b9b4c7", "#dcdde2"), strict=True))
THEMED = {  # CSS variables, so that colors follow light and dark mode
    INK: "--ink", QUIET: "--quiet", RULE: "--rule", PAPER: "--paper",
    **{color: f"--{name.replace('_', '-')}" for name, (color, _) in LOOKS.items()},
    **{color: f"--cause-{cause}" for cause, color in CAUSE_COLORS.items()},
}  # fmt: skip
STYLE: dict[str, Any] = {
    "font.family": "DejaVu Sans", "font.size": 9.5, "text.parse_math": False, "svg.fonttype": "none",
    "axes.titlesize": 9.5, "axes.titleweight": "bold", "axes.titlelocation": "left", "legend.frameon": False,
    "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": QUIET, "xtick.color": QUIET, "ytick.color": QUIET,
    "xtick.labelcolor": INK, "ytick.labelcolor": INK, "axes.facecolor": "none", "figure.facecolor": PAPER,
    "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True, "grid.color": RULE,
    "lines.linewidth": 1.8, "lines.markersize": 6.5,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Picture:
    title: str
    text: str
    svg: str  # trusted; "" without matplotlib


def speed(found: Comparison) -> Picture | None:
    """Plots TPOT with its interval: the base's, or a strip per link if round trips are equal."""
    shown = found.links if _same_round_trip(found) else [found.base]
    strips = [m for m in shown if any(s.tpot_s for s in m.summaries)]
    if not strips:
        return None

    def draw() -> Figure:
        rows = [len(m.summaries) for m in strips]
        figure, panels = _figure(0.9 + 0.25 * sum(rows) + 0.3 * len(strips), len(strips), height_ratios=rows)
        for axes, measured in zip(panels, strips, strict=True):
            _dots(axes, measured)
            axes.set_title(words.link(measured.link) if len(strips) > 1 else "")
        panels[0].set_xlim(0, None)
        panels[-1].set_xlabel("time per output token, ms (line: 95 % interval); left is faster")
        return figure

    return _picture("speed", "Time per token", "Means over all requests, measured at the client.", draw)


def _dots(axes: Axes, measured: Measured) -> None:
    names: list[str] = []
    for summary in measured.summaries:
        if summary.tpot_s is not None:
            color, marker = _look(summary.architecture)
            mean, place = 1000 * summary.tpot_s, len(names)
            low, high = (1000 * each for each in summary.tpot_interval or (summary.tpot_s, summary.tpot_s))
            axes.plot([low, high], [place, place], color=color)
            axes.plot([mean], [place], marker, color=color, markeredgecolor=PAPER, clip_on=False)
            _value(axes, f"{mean:.2f}", max(mean, high), place)
            names.append(words.name(summary.architecture))
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    _grid(axes, "x")


def by_round_trip(found: Comparison) -> Picture | None:
    """Plots measured and predicted TPOT by round trip; None for a single one."""
    links = found.links
    if len(links) < 2 or _same_round_trip(found):
        return None

    def draw() -> Figure:
        figure, (axes,) = _figure(3.8)
        for name in found.architectures:
            color, marker = _look(name)
            points = [(m.rtt_ms, s) for m in links if (s := m.of(name)) and s.tpot_s is not None]
            if not points:
                continue
            rtts, means = [rtt for rtt, _ in points], [1000 * (s.tpot_s or 0.0) for _, s in points]
            axes.plot(rtts, means, marker=marker, color=color, markeredgecolor=PAPER, label=words.name(name))
            for rtt, s in points:
                if s.tpot_interval:
                    axes.plot([rtt, rtt], [1000 * each for each in s.tpot_interval], color=color, linewidth=1)
        at = {m.name: m.rtt_ms for m in links}
        for p in found.theory.predictions if found.theory else ():
            axes.plot([at[p.condition]], [1000 * p.predicted_s], "x", color=_look(p.architecture)[0], markersize=5)
        axes.set_ylim(0, None)
        axes.set_xlabel("round trip between draft and target, ms")
        axes.set_ylabel("time per output token, ms")
        _grid(axes, "y")
        figure.legend(loc="outside upper left", ncols=3)
        return figure

    text = "Lines join what was measured (bars: 95 % interval); crosses are predicted from component times."
    if off := [words.name(each) for each in (found.theory.missed if found.theory else ())]:
        text += f" Predictions missed: {words.joined(off)}."
    return _picture("by-round-trip", "Time per token against round trip", text, draw)


def by_cause(found: Comparison) -> Picture | None:
    shown = [s for s in found.base.summaries if any(s.milliseconds_per_token.values())]
    if not shown:
        return None

    def draw() -> Figure:
        figure, (axes,) = _figure(1.3 + 0.3 * len(shown))
        left, places = [0.0] * len(shown), range(len(shown))
        for cause, color in CAUSE_COLORS.items():
            widths = [s.milliseconds_per_token[cause] or 0.0 for s in shown]
            if any(widths):
                axes.barh(places, widths, 0.7, left, color=color, edgecolor=PAPER, linewidth=0.6, label=cause)
                left = [start + width for start, width in zip(left, widths, strict=True)]
        for place, total in zip(places, left, strict=True):
            _value(axes, f"{total:.1f}", total, place)
        axes.set_yticks(places, [words.name(s.architecture) for s in shown])
        axes.set_ylim(len(shown) - 0.5, -0.5)
        axes.set_xlabel("milliseconds per output token, end to end")
        _grid(axes, "x")
        figure.legend(loc="outside upper left", ncols=6, columnspacing=1.0, handlelength=1.3)
        return figure

    return _picture("by-cause", "Where the milliseconds go", "The causes of a bar add up to its whole time.", draw)


def under_load(found: Comparison) -> Picture | None:
    """Plots latency over throughput, a line per architecture, dashed for open loops."""
    lines: dict[tuple[str, bool], list[tuple[float, float]]] = {}
    for m in found.loads:
        for s in m.summaries:
            rate, tpot = s.mean_output_throughput_token_per_s, s.distributions["tpot_s"].p50
            if m.load and rate and tpot is not None:
                lines.setdefault((s.architecture, m.load.rate is not None), []).append((rate, 1000 * tpot))
    if not lines:
        return None

    def draw() -> Figure:
        figure, (axes,) = _figure(3.8)
        for (name, is_open), points in lines.items():
            color, marker = _look(name)
            axes.plot(
                *zip(*points, strict=True), color=color, marker=marker, linestyle="--" if is_open else "-",
                markerfacecolor=PAPER if is_open else color, label=words.name(name) + (", open" if is_open else ""),
            )  # fmt: skip
        axes.set(xlim=(0, None), ylim=(0, None))
        axes.set_xlabel("output tokens per second, all requests together")
        axes.set_ylabel("median time per token, ms")
        _grid(axes, "y")
        figure.legend(loc="outside upper left", ncols=3)
        return figure

    loads = words.joined([str(m.load) for m in found.loads])
    text = f"Further right and lower is better. Points of a line, in order: {loads}."
    return _picture("under-load", "Latency against throughput", text, draw)


def _picture(name: str, title: str, text: str, draw: Callable[[], Figure]) -> Picture:
    try:
        import matplotlib as mpl
    except ImportError:
        return Picture(title, text, "")
    out = io.StringIO()
    with _styled(), mpl.rc_context({"svg.hashsalt": name}):
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        draw().savefig(out, format="svg", transparent=True, metadata=nothing)
    return Picture(title, text, _for_a_page(out.getvalue(), name, f"{title}. {text}"))


def _for_a_page(svg: str, name: str, label: str) -> str:
    """Makes ids unique, and fonts and colors the page's."""
    box = re.search(r'viewBox="([^"]+)"', svg)
    body = svg[svg.index("<svg") :]
    body = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", body[body.index(">") + 1 :], flags=re.DOTALL)
    body = re.sub(r'( id="|url\(#|xlink:href="#)', rf"\1{name}-", body).replace("xlink:href", "href")
    body = re.sub(r"font: ([^;\"]*?)(\d[\d.]*)px [^;\"]*", r"font-size: \2px", body)
    body = re.sub(r"font-family: [^;\"]*;? ?", "", body)
    for color, variable in THEMED.items():
        body = re.sub(rf"{color}(?![0-9a-f])", f"var({variable})", body, flags=re.IGNORECASE)
    return f'<svg viewBox="{box[1] if box else ""}" role="img" aria-label="{escape(label)}">{body}'


@contextmanager
def _styled() -> Iterator[None]:
    """Applies the style, without the user's matplotlibrc."""
    from matplotlib import style

    with style.context(["default", STYLE]):
        yield


def _figure(height: float, rows: int = 1, **how: Any) -> tuple[Figure, list[Axes]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    return figure, list(figure.subplots(rows, 1, squeeze=False, sharex=True, **how).flat)


def _look(architecture: str) -> tuple[str, str]:
    return LOOKS.get(architecture, (INK, "X"))


def _grid(axes: Axes, axis: Literal["x", "y"]) -> None:
    axes.grid(True, axis=axis)
    axes.tick_params(length=0)


def _value(axes: Axes, text: str, x: float, y: float) -> None:
    axes.annotate(text, (x, y), (6, 0), textcoords="offset points", va="center", fontsize=9)


def _same_round_trip(found: Comparison) -> bool:
    """Whether several links differ in something other than the round trip."""
    return len({m.rtt_ms for m in found.links}) < len(found.links)
