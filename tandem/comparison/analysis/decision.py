"""Decides which architecture and length to use, with what certainty, and what would change the decision."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tandem.comparison.analysis.bootstrap import Interval
from tandem.comparison.analysis.doubt import MISSED, Doubt, Sureness
from tandem.comparison.analysis.evidence import missed
from tandem.comparison.analysis.findings import Theory
from tandem.comparison.analysis.predictions import BestLength
from tandem.comparison.analysis.summary import Summary
from tandem.comparison.analysis.verdicts import Verdict
from tandem.comparison.measuring import architectures as arch
from tandem.comparison.measuring.conditions import Condition
from tandem.comparison.measuring.distributions import ratio
from tandem.comparison.measuring.json_form import INLINE
from tandem.comparison.report.formatting import break_even, joined, ms, name_in_sentence, over_fused

WORTH = 0.03
"""The least predicted saving in time per token for which a length other than the measured one is proposed."""
WORTH_OVER_AUTO = 0.05
"""The same over lengths chosen by measurement (auto), which do better than a prediction that knows them on average."""
PREDICTIONS_MISSED = (
    "What would change this cannot be told: predictions missed what was measured. Measure again on an idle machine."
)


@dataclass(frozen=True, slots=True)
class Decision:
    """A decision. `headline` and `doubt` are those of the base's verdict; `ratios` states what was measured.

    `speedup` is over plain decoding; `speculation_length` None is adaptive. comparison.schema.json describes all.
    """

    headline: str
    ratios: str
    doubt: Doubt = field(metadata=INLINE)
    architecture: str
    speculation_length: int | None
    speedup: float | None
    speedup_interval: Interval | None
    because: tuple[str, ...]
    would_change: tuple[str, ...]


def decide(
    verdict: Verdict, base: Condition, summaries: Sequence[Summary], theory: Theory | None, adaptive: bool = False
) -> Decision | None:
    """Explains the base's verdict from its figures; None if fewer than two architectures were measured.

    `adaptive`: whether speculation lengths were chosen adaptively.
    """
    tpots = {
        s.architecture: mean
        for s in summaries
        if s.architecture in arch.CONNECTABLE and (mean := s.distributions["tpot_s"].mean) is not None
    }
    width_1 = tpots.pop(arch.WIDTH_1.name, None)
    if width_1 is not None:  # it stands for plain decoding if that failed
        tpots.setdefault(arch.AUTOREGRESSIVE.name, width_1)
    if len(tpots) < 2:
        return None
    best = verdict.architecture
    names = arch.PLAIN if best == arch.AUTOREGRESSIVE.name else (best,)
    chosen = next(s for s in summaries if s.architecture in names)
    reliable = None if (missed(theory) or 0.0) > MISSED else theory
    length, advice = _length(best, reliable)
    if theory and reliable is None:
        length = 0 if best == arch.AUTOREGRESSIVE.name else theory.model.length
    return Decision(
        headline=verdict.headline,
        ratios=("Not to be relied on: " if verdict.doubt.sureness is Sureness.NOISE else "")
        + _ratios(base, tpots, reliable),
        doubt=verdict.doubt,
        architecture=best,
        speculation_length=None if adaptive and best != arch.AUTOREGRESSIVE.name else length,
        speedup=chosen.speedup.speedup,
        speedup_interval=chosen.speedup.interval,
        because=tuple(
            [*_measured(chosen, summaries, adaptive), *advice, *_over_lookup(tpots), *_against(tpots, theory)]
        ),
        would_change=tuple(_would_change(best, tpots, reliable) if reliable or not theory else [PREDICTIONS_MISSED]),
    )


def _over_lookup(tpots: Mapping[str, float]) -> Iterator[str]:
    """States what each draft apart from its target gains over copies beside it, which need no draft model."""
    lookup = tpots.get(arch.LOOKUP.name)
    apart = [name for name in tpots if lookup and name in arch.COMPARED and arch.COMPARED[name].split]
    if lookup and apart:
        said = (f"{name_in_sentence(name)} {tpots[name] / lookup:.2f}" for name in apart)
        yield f"Of the time per token of lookup, which has no draft model, a draft elsewhere takes: {', '.join(said)}."


def where(base: Condition) -> str:
    if base.link.rtt_ms is None:
        return "On this link (not emulated)"
    return f"On this link (emulated, {base.link})"


def _ratios(base: Condition, tpots: Mapping[str, float], theory: Theory | None) -> str:
    """States how much faster the fastest was than each other one; and the break-even, if predictions hold."""
    best = min(tpots, key=tpots.__getitem__)
    others = (name for name in tpots if name != best)
    order = sorted(others, key=lambda name: (name == arch.AUTOREGRESSIVE.name, tpots[name]))
    parts = [f"{_faster(tpots[best], tpots[name])} {name_in_sentence(name)}" for name in order]
    text = f"{where(base)} {name_in_sentence(best)} is {joined(parts)}"
    even = theory.break_even_rtt_s if theory else None
    if even is None or best == arch.AUTOREGRESSIVE.name:
        return text + "."
    if even <= 0:
        return f"{text}; distributed beats plain decoding at no round trip."
    return f"{text}; distributed beats plain decoding below {ms(even, 0)} RTT."


def _faster(best_s: float, other_s: float) -> str:
    times = ratio(other_s, best_s)
    if times is not None:
        return f"{times:.2f} times faster than"
    return "too fast for the clock, faster than" if other_s else "as fast, to the clock, as"


def _length(best: str, theory: Theory | None) -> tuple[int | None, list[str]]:
    """Returns the measured length (None: it adapted) and sentences on the predicted best length."""
    found = [b for b in theory.best_lengths if b.architecture == best] if theory else []
    if not found or theory is None:
        return (0 if best == arch.AUTOREGRESSIVE.name or theory is None else theory.model.length), []
    first, measured = found[0], theory.model.length
    if measured is None:
        return None, _over_auto(first, theory)
    share = ratio(first.tpot_s, first.tpot_s_by_length[measured])
    saved = 0.0 if share is None else 1 - share
    if first.length == measured:
        return measured, [f"Speculation length {measured}, the measured one, is also the predicted best."]
    if saved < WORTH:
        return measured, [
            f"Speculation length {measured} was measured; the predicted best of those costed, {first.length},"
            f" would save {100 * saved:.1f} % of the time per token, which is not worth a change."
        ]
    return measured, [
        f"Speculation length {first.length} is predicted to save {100 * saved:.0f} % of the time per token"
        f" over the measured {measured}: compare with --speculation-length {first.length} before you rely on it."
    ]


def _over_auto(best: BestLength, theory: Theory) -> list[str]:
    """States what a fixed length is predicted to save over the lengths that auto chose."""
    ran = next(p.predicted_tpot_s for p in theory.predictions if p.architecture == best.architecture)
    tpots = best.tpot_s_by_length
    fixed = min(range(1, len(tpots)), key=tpots.__getitem__, default=None)
    share = None if fixed is None else ratio(tpots[fixed], ran)
    if share is None:
        return []
    if 1 - share < WORTH_OVER_AUTO:
        return ["No fixed speculation length of those costed is predicted to be clearly faster than auto."]
    return [
        f"Speculation length {fixed} is predicted to save {100 * (1 - share):.0f} % of the time per token over auto:"
        f" compare with --speculation-length {fixed} before you rely on it."
    ]


def _measured(chosen: Summary, summaries: Sequence[Summary], adaptive: bool) -> list[str]:
    sentences: list[str] = []
    drafted = chosen.acceptance
    if adaptive and drafted.drafted:
        none = drafted.rounds_by_length[0] / drafted.rounds
        sentences.append(
            f"Draft lengths were chosen by measurement (auto): {drafted.drafted / drafted.rounds:.2f} tokens a round on"
            f" average, none in {100 * none:.0f} % of the rounds."
        )
    if chosen.speedup.speedup and chosen.speedup.interval:
        low, high = chosen.speedup.interval
        sentences.append(
            f"Measured speedup over plain decoding: {chosen.speedup.speedup:.2f}, 95 % interval {low:.2f} to {high:.2f}"
            f" over {chosen.speedup.pairs} requests (paired by prompt)."
        )
    checked = [s for s in summaries if s.identical and s.architecture != arch.AUTOREGRESSIVE.name]
    if checked and all(s.identical and s.identical.count == s.identical.total for s in checked):
        sentences.append("Every output was token-identical to plain decoding.")
    elif checked:
        diverged_prompts = sum(len(s.identical.divergences) for s in checked if s.identical)
        sentences.append(f"{diverged_prompts} outputs differ from plain decoding's; each is listed with its logit gap.")
    return sentences


def _against(tpots: Mapping[str, float], theory: Theory | None) -> list[str]:
    if theory is None:
        return []
    sentences: list[str] = []
    bounds = (arch.PIPELINED.name,)  # a lower bound, not a prediction
    errors = [abs(p.error) for p in theory.predictions if p.error is not None and p.architecture not in bounds]
    if errors:
        sentences.append(
            f"Predictions from component times miss the {len(errors)} measured times per token by"
            f" {100 * sum(errors) / len(errors):.1f} % on average, {100 * max(errors):.1f} % at most."
        )
    if (factor := missed(theory) or 0.0) > MISSED:
        return [
            f"Step times do not explain what was measured: predictions miss it by a factor of up to {factor:.2f}, so"
            " neither a break-even nor another speculation length is given."
        ]
    even = theory.break_even_rtt_s
    if even is not None and even > 0:
        sentences.append(break_even(even, theory.break_even_interval_s, theory.measured_break_even_rtt_s))
    until = _waiting_pays_until(tpots, theory)
    if until is not None:
        sentences.append(f"A target that never waits is predicted to beat rounds that wait from {ms(until, 0)} RTT on.")
    if theory.distributed_over_fused_s is not None:
        sentences.append(over_fused(theory.distributed_over_fused_s))
    return sentences


def _waiting_pays_until(tpots: Mapping[str, float], theory: Theory) -> float | None:
    """Returns the round trip from which a target that never waits is ahead, unless its predictions missed."""
    name = arch.NEVER_WAITING.name
    off = any(p.missed for p in theory.predictions if p.architecture == name)
    return theory.waiting_pays_until_s if name in tpots and not off else None


def _would_change(best: str, tpots: Mapping[str, float], theory: Theory | None) -> list[str]:
    sentences: list[str] = []
    if theory is None:
        return ["Without plain decoding and a drafting architecture in one run there is no prediction for other links."]
    even, gain = theory.break_even_rtt_s, theory.model.capacity_gain()
    until = _waiting_pays_until(tpots, theory)
    if best == arch.FUSED.name and arch.DISTRIBUTED.name in tpots:
        sentences.append("No round trip makes distributed faster than fused with the same draft: it pays one a round.")
        below = "If the target's host cannot hold the draft: distributed below"
        if until is not None:
            sentences.append(f"{below} {ms(until, 0)} RTT, never waiting above.")
        elif even is not None and even > 0:
            sentences.append(f"{below} {ms(even, 0)} RTT, plain decoding above.")
    if best == arch.DISTRIBUTED.name and until is not None:
        sentences.append(f"A round trip above {ms(until, 0)}: a target that never waits.")
    elif best == arch.DISTRIBUTED.name and even is not None:
        sentences.append(f"A round trip above {ms(even, 0)}: plain decoding is then predicted to be faster.")
    if gain is not None:
        sentences.append(
            f"Many clients on one target: with drafts elsewhere it serves {gain:.2f} times as many"
            " (predicted, if the target is the bottleneck)."
        )
    if best != arch.AUTOREGRESSIVE.name and best in theory.model.drafts:
        base = next(p for p in theory.predictions if p.architecture == best)
        least = theory.model.least_tokens_per_round(best, base.predicted_tpot_s)
        now = theory.model.drafts[best].per_round
        if least is not None and theory.model.length is None:
            sentences.append(
                f"Prompts that commit fewer than {least:.2f} tokens a round (here {now:.2f}) with drafts as long as"
                " here: plain decoding, or drafts as short as auto then makes them."
            )
        elif least is not None:
            sentences.append(
                f"Prompts that commit fewer than {least:.2f} tokens a round (here {now:.2f}): plain decoding."
            )
    return sentences
