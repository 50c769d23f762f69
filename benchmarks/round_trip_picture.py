"""Draws docs/round-trip.png, time per token against round trip, from the figures measured in docs/performance.md.

    .venv/bin/python -m benchmarks.round_trip_picture

Nothing is measured by this program: `figures` reads the page, which says how they were taken, and the picture holds
them as text, so that a test can tell when the page has others.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1] / "docs"
PICTURE = DOCS / "round-trip.png"
Points = dict[int, float]
"""Round trip in ms: time per token over that of plain decoding across the same link."""


def figures() -> dict[str, Points]:
    """Returns the measured points of each architecture."""
    page = (DOCS / "performance.md").read_text(encoding="utf-8").partition("## A target that never waits")[2]
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in page.partition("\n\n(Waiting")[0].splitlines()
        if re.match(r"\| \d", line)
    ]
    waiting = re.findall(r"at (\d+) ms (?:took )?([\d.]+)", _sentence(page, "Waiting"))
    fused = re.findall(r"([\d.]+)(?: of plain decoding's time)? at (\d+) ms", _sentence(page, "Fused"))
    return {
        "fused": {int(rtt): float(ratio) for ratio, rtt in fused},
        "distributed, rounds wait": {0: float(rows[0][1])} | {int(rtt): float(ratio) for rtt, ratio in waiting},
        "distributed, never waiting": {int(row[0].split()[0]): float(row[2]) for row in rows},
    }


def _sentence(page: str, beginning: str) -> str:
    (found,) = re.findall(rf"\({beginning}\b.*? run\b.*?\.\)", page, re.DOTALL)
    return " ".join(found.split())


def text(points: dict[str, Points]) -> str:
    """The figures as the picture holds them."""
    return json.dumps(points)


def draw(points: dict[str, Points], file: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.axhline(1, color="0.4", linewidth=1.5, linestyle="--", label="plain decoding = 1")
    for (name, of), color in zip(points.items(), ("#2a7f62", "#c0392b", "#2b5fa8"), strict=True):
        axes.plot(list(of), list(of.values()), "o-", color=color, label=name)
        last = max(of)
        axes.annotate(
            f"{of[last]:g}",
            (last, of[last]),
            (6, -9 if of[last] < 1 else 0),
            textcoords="offset points",
            va="center",
            color=color,
        )
    axes.set_yscale("log")
    axes.set_yticks([0.5, 0.7, 1, 2, 3, 5, 10], labels=["0.5", "0.7", "1", "2", "3", "5", "10"])
    axes.minorticks_off()
    axes.set_xticks([0, 20, 50, 100, 200])
    axes.set_xlim(-8, 216)
    axes.set_xlabel("round trip between client and target, ms (emulated link)")
    axes.set_ylabel("time per token, plain decoding = 1")
    axes.set_title("SmolLM2-135M-Instruct with the shipped draft, bfloat16, greedy, on a CPU", fontsize=10)
    axes.grid(alpha=0.25)
    axes.legend(loc="upper left", frameon=False)
    figure.savefig(file, dpi=110, metadata={"Description": text(points), "Software": None})


if __name__ == "__main__":
    draw(figures(), PICTURE)
    print(PICTURE)
