"""A report's sentences."""

from __future__ import annotations

from collections.abc import Iterator

from tandem.comparison.analysis import words
from tandem.comparison.analysis.comparison import Comparison
from tandem.comparison.analysis.verdict import Decision, busy
from tandem.comparison.analysis.words import name, name_in_sentence
from tandem.comparison.measuring.architectures import AUTOREGRESSIVE

PACKAGES = ("torch", "transformers", "numpy")


def partial(found: Comparison) -> str | None:
    """Why and how much is missing; None if complete."""
    if found.missing is None:
        return None
    return f"{found.missing}; {len(found.records)} of {found.planned or 'an unknown number of'} requests were measured"


def undecided(found: Comparison) -> str:
    measured = [s.architecture for s in found.base.summaries if s.tpot_s is not None]
    if not measured:
        return "No decision: no request completed with two tokens or more."
    return f"No decision: only {words.joined([name_in_sentence(each) for each in measured])} was measured."


def reasons(decision: Decision) -> str:
    """Returns why it is as sure as it is; of what is undecided, the sentence has the first reason."""
    shown = decision.doubt.reasons[0 if decision.decided else 1 :]
    why = f"{words.capitalised('; '.join(shown))}." if shown else ""
    surer = f"To be surer, measure again {', '.join(decision.doubt.surer)}." if decision.doubt.surer else ""
    return f"{why} {surer}".strip()


def doubts(decision: Decision) -> Iterator[str]:
    yield f"How sure: {decision.sureness}. {reasons(decision)}".rstrip()


def ratios(decision: Decision) -> Iterator[str]:
    """The fastest's speed over each other architecture's, that of the sentence first."""
    for rival in sorted(decision.rivals, key=lambda rival: rival.over not in (decision.over, decision.architecture)):
        if rival.ratio is not None:
            ratio = words.with_interval(f"{rival.ratio:.2f}", rival.interval)
            fastest, other = name_in_sentence(decision.fastest), name_in_sentence(rival.over)
            yield f"{fastest} is {ratio} {decision.unit} {other}"


def not_measured(found: Comparison) -> Iterator[str]:
    """A line per round trip that was named but not measured or decided."""
    measured = {m.rtt_ms: m for m in found.links}
    for rtt_ms in found.config.rtt_ms:
        if rtt_ms not in measured:
            yield f"At {rtt_ms:g} ms: not measured."
    for m in found.links:
        if len(found.links) > 1 and not m.decision:
            yield f"{m.name}: not decided, fewer than two architectures answered."


def identity(found: Comparison) -> str:
    checked = [
        s.identical
        for m in found.conditions
        for s in m.summaries
        if s.identical and (s.architecture != AUTOREGRESSIVE.name or m.load)
    ]
    total, same = sum(each.total for each in checked), sum(each.count for each in checked)
    if not total:
        return "Outputs were not compared with plain decoding's."
    return f"{same} of {total} outputs have the tokens of plain decoding."


def drafts(found: Comparison) -> Iterator[str]:
    """Lengths and proposers of drafts, and the steps of a target that never waits."""
    for s in found.base.summaries:
        of, each = s.acceptance, name(s.architecture)
        if of.drafted:
            rounds = ", ".join(f"{count} with {n}" for n, count in enumerate(of.rounds_by_length) if count)
            mean = f"{of.drafted / of.rounds:.2f} tokens a round on average"
            yield f"drafted, {each}: {mean}" + (rounds and f"; rounds: {rounds} draft tokens")
        if len(of.drafted_by) > 1:
            parts = (f"{who} {of.accepted_by.get(who, 0)} of {count}" for who, count in of.drafted_by.items())
            yield f"accepted, {each}: {', '.join(parts)}"
        if of.run_steps:
            yield (
                f"the target of {each} made {of.run_steps} steps, {of.drafted_steps} with a draft and"
                f" {of.wasted_steps} for nothing; {of.unverified_drafts} draft tokens were never verified."
            )


def setting(found: Comparison) -> str:
    config, base = found.config, found.base
    length = "draft lengths by measurement" if config.speculation_length is None else f"k = {config.speculation_length}"
    rule = "" if base.rule.value == "agreement" else f", verified by {base.rule.value}"
    parts = [
        words.plural(len(config.prompts), "prompt"),
        words.plural(config.num_runs, "run") if config.num_runs > 1 else "",
        f"at most {config.max_new_tokens} tokens each",
        f"{words.sampling(base.sampling)}{rule}",
        length,
    ]
    return ", ".join(part for part in parts if part)


def models(found: Comparison, field: str) -> list[str]:
    return list(dict.fromkeys(str(value) for e in found.endpoints if (value := getattr(e.model, field))))


def card(found: Comparison) -> dict[str, str]:
    machine, packages = found.machine, found.machine.packages
    own = [f"Tandem {machine.git_commit}"] if machine.git_commit else []
    own += [f"Python {machine.python}", *(f"{each} {packages[each]}" for each in PACKAGES if each in packages)]
    connected = [f"{name(e.architecture.name)} at {e.address}" for e in found.endpoints if e.log is None]
    links = "; ".join(words.link(m.link) for m in found.links)
    drafts = [draft.removeprefix("remote:") for draft in models(found, "draft_name")]
    share = busy([r.machine_load for r in found.records if r.machine_load], machine.usable_cores)
    cards = {
        "Machine": str(machine),
        "Other programs": "" if share is None else f"wanted {100 * share:.0f} % of the machine",
        "Software": ", ".join(own),
        "Target": ", ".join(models(found, "model_name")),
        "Draft": ", ".join(dict.fromkeys(drafts)),
        "Weights": f"{', '.join(models(found, 'dtype'))} on {', '.join(models(found, 'device'))}",
        "Link": "direct" if found.base.link.rtt_ms is None else f"emulated: {links}",
        "Servers": f"ran already: {', '.join(connected)}" if connected else "all started for this comparison",
    }
    return {what: value for what, value in cards.items() if value}
