"""Builds what stands first in a report: what to do, how sure that is, at each round trip, and the commands for it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from tandem.comparison.measuring.architectures import PLAIN
from tandem.comparison.measuring.attempt import tried
from tandem.comparison.report import formatting as fmt
from tandem.comparison.report import reading
from tandem.comparison.report.blocks import Text, Verdict, bullets, paragraph
from tandem.comparison.report.deploying import LOOPBACK, deployment
from tandem.comparison.report.reading import JSON

NOT_MEASURED = "Not measured."
APART = f"On two machines, put the other's address in place of {LOOPBACK}, and secure both (docs/security.md)."


@dataclass(frozen=True, slots=True)
class Top:
    """The first part of a report; the fields are those of `Report`."""

    headline: str
    sureness: str = ""
    doubt: tuple[str, ...] = ()
    ratios: tuple[tuple[str, str, str], ...] = ()
    verdicts: tuple[Verdict, ...] = ()
    commands: tuple[Text, ...] = ()
    reasons: tuple[Text, ...] = ()


def top_of(comparison: JSON) -> Top:
    """Returns the decision, or why there is none."""
    decision, loaded = comparison["decision"], comparison.get("under_load")
    if decision is None:
        return Top(_why_undecided(comparison), ratios=ratios(comparison), verdicts=verdicts(comparison))
    said = [decision.get("ratios"), *decision["because"], loaded and loaded["headline"]]
    doubts = [fmt.capitalised(f"{reason}.") for reason in decision.get("reasons", ())]
    reasons = (
        bullets("Because" if _decided(decision) else "Measured, and not enough to decide", filter(None, said)),
        bullets("What would change it", decision["would_change"]),
        bullets("How sure it is", doubts[1:]),
    )
    return Top(
        headline=decision["headline"].rstrip(".") + ".",
        sureness=decision.get("sureness", ""),
        doubt=doubt_of(decision),
        ratios=ratios(comparison),
        verdicts=verdicts(comparison),
        commands=_commands(comparison),
        reasons=tuple(reason for reason in reasons if reason.lines),
    )


def doubt_of(of: JSON) -> tuple[str, ...]:
    """Returns the first reason for the sureness of a decision, and what would make it surer."""
    why = [fmt.capitalised(f"{reason}.") for reason in of.get("reasons", ())[:1]]
    surer = [f"To be surer, measure again {', '.join(of['surer'])}."] if of.get("surer") else []
    return (*why, *surer)


def ratios(comparison: JSON) -> tuple[tuple[str, str, str], ...]:
    """Returns the speedup of every architecture over plain decoding under the base, the most first."""
    found, names = reading.base(comparison)["architectures"], reading.compared_with_baseline(comparison)
    known = [(speedup, name, found[name]) for name in names if (speedup := found[name]["speedup_vs_autoregressive"])]
    return tuple(
        (fmt.times(speedup), fmt.name(name), fmt.span(of["speedup_interval"]).replace(fmt.MISSING, "no interval"))
        for speedup, name, of in sorted(known, key=lambda one: -one[0])
    )


def verdicts(comparison: JSON) -> tuple[Verdict, ...]:
    """Returns a verdict on each link that was measured, and a line for each round trip that was asked for and was not.

    None if it was one, which the headline is about, and of a file from before there were verdicts.
    """
    if "verdicts" not in comparison:
        return ()
    found = {verdict["condition"]: verdict for verdict in comparison["verdicts"]}
    at = [(float(c["link"]["rtt_ms"]), _verdict(c, found.get(c["name"]))) for c in reading.links(comparison)]
    asked = {float(rtt) for rtt in comparison["settings"].get("rtts_ms") or ()} - {rtt for rtt, _ in at}
    at += [(rtt, Verdict(f"{rtt:g} ms", NOT_MEASURED)) for rtt in asked]
    return tuple(each for _, each in sorted(at, key=lambda one: one[0])) if len(at) > 1 else ()


def _verdict(condition: JSON, found: JSON | None) -> Verdict:
    where = fmt.rtt(condition["link"])
    if found is None:
        return Verdict(where, "Not decided.")
    what = fmt.capitalised(found["headline"].partition(", ")[2] or found["headline"])
    against = "the fastest that drafts" if found["architecture"] in PLAIN else "plain decoding"
    ratio = "" if found["ratio"] is None else f"{fmt.times(found['ratio'])} {against}"
    return Verdict(
        where, what, found["sureness"], fmt.with_interval(ratio, found["interval"]), " ".join(doubt_of(found)[:1])
    )


def _commands(comparison: JSON) -> tuple[Text, ...]:
    """Returns the commands of what is chosen, at the base link first; none that this file's settings do not give."""
    decision, after = comparison["decision"], comparison.get("verdicts", ())
    chosen = dict.fromkeys([decision["architecture"], *(one["architecture"] for one in after if _decided(one))])
    made = (tried([], "The command", partial(deployment, comparison, name), None) for name in chosen)
    found = [text for text in made if text]
    if found and not _decided(decision):
        found[0] = replace(found[0], heading=f"{found[0].heading}: not decided, but the fastest so far")
    return (*found, *([paragraph(APART)] if any(len(text.lines) > 1 for text in found) else []))


def _decided(of: JSON) -> bool:
    return of.get("sureness") != "noise"


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
