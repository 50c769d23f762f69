"""Builds what stands first in a report: what to do, how sure that is, at each round trip, and the commands for it."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.comparison.report import formatting as fmt
from tandem.comparison.report import reading
from tandem.comparison.report.attempt import tried
from tandem.comparison.report.blocks import Text, Verdict, bullets
from tandem.comparison.report.deploying import deployment
from tandem.comparison.report.reading import JSON


@dataclass(frozen=True, slots=True)
class Top:
    """The first part of a report; the fields are those of `Report`."""

    headline: str
    sureness: str = ""
    surer: tuple[str, ...] = ()
    ratios: tuple[tuple[str, str, str], ...] = ()
    verdicts: tuple[Verdict, ...] = ()
    commands: tuple[Text, ...] = ()
    reasons: tuple[Text, ...] = ()


def top_of(comparison: JSON) -> Top:
    """Returns the decision, or why there is none."""
    decision, loaded = comparison["decision"], comparison.get("under_load")
    if decision is None:
        return Top(_why_undecided(comparison))
    because = [*decision["because"], *([loaded["headline"]] if loaded and loaded["headline"] else [])]
    reasons = (bullets("Because", because), bullets("What would change it", decision["would_change"]))
    return Top(
        headline=decision["headline"],
        sureness=decision.get("sureness") or "",
        surer=tuple(decision.get("surer") or ()),
        ratios=ratios(comparison),
        verdicts=verdicts(comparison),
        commands=_commands(comparison),
        reasons=tuple(reason for reason in reasons if reason.lines),
    )


def ratios(comparison: JSON) -> tuple[tuple[str, str, str], ...]:
    """Returns the speedup of every architecture over plain decoding under the base, the most first."""
    found, names = reading.base(comparison)["architectures"], reading.compared_with_baseline(comparison)
    known = [(speedup, name, found[name]) for name in names if (speedup := found[name]["speedup_vs_autoregressive"])]
    return tuple(
        (fmt.times(speedup), fmt.name(name), fmt.span(of["speedup_interval"]))
        for speedup, name, of in sorted(known, key=lambda one: -one[0])
    )


def verdicts(comparison: JSON) -> tuple[Verdict, ...]:
    return ()


def _commands(comparison: JSON) -> tuple[Text, ...]:
    """Returns the commands of what is decided; none if they cannot be made of this file's settings."""
    chosen = comparison["decision"]["architecture"]
    made: Text | None = tried([], "The command", lambda: deployment(comparison, chosen), None)
    return (made,) if made else ()


def _why_undecided(comparison: JSON) -> str:
    base = reading.base(comparison)
    measured = [name for name in base["architectures"] if reading.mean_tpot(base, name) is not None]
    if not measured:
        return "No decision: no request completed with two tokens or more."
    if len(measured) == 1:
        return f"No decision: only {fmt.name_in_sentence(measured[0])} was measured."
    if reading.baseline(comparison) is None:
        return "No decision: plain decoding did not run, so speculation has no baseline."
    return "No decision: this comparison.json contains none; its figures are below."
