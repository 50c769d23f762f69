"""Decides which architecture and length to use, with what certainty, and what would change the decision."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tandem.comparison.analysis.bootstrap import Interval
from tandem.comparison.analysis.findings import Theory
from tandem.comparison.analysis.metrics import ratio
from tandem.comparison.analysis.summary import Summary
from tandem.comparison.measuring.architectures import (
    AUTOREGRESSIVE,
    COMPARED,
    DISTRIBUTED,
    FUSED,
    NEVER_WAITING,
    PIPELINED,
)
from tandem.comparison.measuring.conditions import Condition
from tandem.comparison.report.formatting import joined, name_in_sentence

WORTH = 0.03
"""The least predicted saving in time per token for which a length other than the measured one is proposed."""


@dataclass(frozen=True, slots=True)
class Decision:
    """A decision. `speedup` is measured over plain decoding; `speculation_length` None is adaptive.

    comparison.schema.json describes the fields.
    """

    headline: str
    architecture: str
    speculation_length: int | None
    speedup: float | None
    speedup_interval: Interval | None
    because: tuple[str, ...]
    would_change: tuple[str, ...]


def decide(
    base: Condition, summaries: Sequence[Summary], theory: Theory | None, adaptive: bool = False
) -> Decision | None:
    """Decides from the base's figures; None if fewer than two architectures were measured.

    `adaptive`: whether speculation lengths were chosen adaptively.
    """
    tpots = {
        s.architecture: mean
        for s in summaries
        if s.architecture in COMPARED and (mean := s.distributions["tpot_s"].mean) is not None
    }
    if len(tpots) < 2:
        return None
    best = min(tpots, key=tpots.__getitem__)
    chosen = next(s for s in summaries if s.architecture == best)
    length, advice = _length(best, theory)
    return Decision(
        headline=_headline(best, base, tpots, theory),
        architecture=best,
        speculation_length=None if adaptive and best != AUTOREGRESSIVE.name else length,
        speedup=chosen.speedup.speedup if chosen.speedup else None,
        speedup_interval=chosen.speedup.interval if chosen.speedup else None,
        because=tuple([*_how_sure(chosen, summaries), *advice, *_against(tpots, theory)]),
        would_change=tuple(_would_change(best, tpots, theory)),
    )


def where(base: Condition) -> str:
    if base.link.rtt_ms is None:
        return "On this link (not emulated)"
    return f"On this link (emulated, {base.link})"


def _headline(best: str, base: Condition, tpots: Mapping[str, float], theory: Theory | None) -> str:
    others = sorted((name for name in tpots if name != best), key=tpots.__getitem__)
    order = [
        *(name for name in others if name != AUTOREGRESSIVE.name),
        *(n for n in others if n == AUTOREGRESSIVE.name),
    ]
    parts = [f"{_faster(tpots[best], tpots[name])} {name_in_sentence(name)}" for name in order]
    text = f"{where(base)} {name_in_sentence(best)} is {joined(parts)}"
    even = theory.break_even_rtt_s if theory else None
    if even is None or best == AUTOREGRESSIVE.name:
        return text + "."
    if even <= 0:
        return f"{text}; distributed beats plain decoding at no round trip."
    return f"{text}; distributed beats plain decoding below {_ms(even)} RTT."


def _faster(best_s: float, other_s: float) -> str:
    times = ratio(other_s, best_s)
    if times is not None:
        return f"{times:.2f} times faster than"
    return "too fast for the clock, faster than" if other_s else "as fast, to the clock, as"


def _length(best: str, theory: Theory | None) -> tuple[int, list[str]]:
    """Returns the measured length and sentences on the predicted best length."""
    found = [b for b in theory.best_lengths if b.architecture == best] if theory else []
    if not found or theory is None:
        return (0 if best == AUTOREGRESSIVE.name or theory is None else theory.model.length), []
    first, measured = found[0], theory.model.length
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


def _how_sure(chosen: Summary, summaries: Sequence[Summary]) -> list[str]:
    sentences: list[str] = []
    if chosen.speedup and chosen.speedup.speedup and chosen.speedup.interval:
        low, high = chosen.speedup.interval
        sentences.append(
            f"Measured speedup over plain decoding: {chosen.speedup.speedup:.2f}, 95 % interval {low:.2f} to {high:.2f}"
            f" over {chosen.speedup.pairs} requests (bootstrap over prompts)."
        )
    checked = [s for s in summaries if s.identical and s.architecture != AUTOREGRESSIVE.name]
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
    bounds = (PIPELINED.name,)  # a lower bound, not a prediction
    errors = [abs(p.error) for p in theory.predictions if p.error is not None and p.architecture not in bounds]
    if errors:
        sentences.append(
            f"Predictions from component times miss the {len(errors)} measured times per token by"
            f" {100 * sum(errors) / len(errors):.1f} % on average, {100 * max(errors):.1f} % at most."
        )
    even, interval = theory.break_even_rtt_s, theory.break_even_interval_s
    if even is not None and even > 0:
        spread = f" (95 % interval {_ms(interval[0])} to {_ms(interval[1])})" if interval else ""
        crossed = theory.measured_break_even_rtt_s
        seen = f"; measured, the two cross at {_ms(crossed)}" if crossed is not None else ""
        sentences.append(f"Distributed breaks even with plain decoding at {_ms(even)} RTT, predicted{spread}{seen}.")
    until = theory.waiting_pays_until_s
    if until is not None and NEVER_WAITING.name in tpots:
        sentences.append(f"A target that never waits is predicted to beat rounds that wait from {_ms(until)} RTT on.")
    if theory.distributed_over_fused_s is not None:
        more = theory.distributed_over_fused_s
        how = f"{abs(1000 * more):.1f} ms a token {'more' if more >= 0 else 'less'}"
        sentences.append(f"Distributed pays {how} than fused at the base link, measured.")
    return sentences


def _would_change(best: str, tpots: Mapping[str, float], theory: Theory | None) -> list[str]:
    sentences: list[str] = []
    if theory is None:
        return ["Without plain decoding and a drafting architecture in one run there is no prediction for other links."]
    even, gain = theory.break_even_rtt_s, theory.model.capacity_gain()
    if best == FUSED.name and DISTRIBUTED.name in tpots:
        sentences.append("No round trip makes distributed faster than fused with the same draft: it pays one a round.")
        if NEVER_WAITING.name in tpots and theory.waiting_pays_until_s is not None:
            until = _ms(theory.waiting_pays_until_s)
            sentences.append(
                f"If the target's host cannot hold the draft: distributed below {until} RTT, never waiting above."
            )
        elif even is not None and even > 0:
            sentences.append(
                f"If the target's host cannot hold the draft: distributed below {_ms(even)} RTT, plain decoding above."
            )
    if best == DISTRIBUTED.name and NEVER_WAITING.name in tpots and theory.waiting_pays_until_s is not None:
        sentences.append(f"A round trip above {_ms(theory.waiting_pays_until_s)}: a target that never waits.")
    elif best == DISTRIBUTED.name and even is not None:
        sentences.append(f"A round trip above {_ms(even)}: plain decoding is then predicted to be faster.")
    if gain is not None:
        sentences.append(
            f"Many clients on one target: with drafts elsewhere it serves {gain:.2f} times as many"
            " (predicted, if the target is the bottleneck)."
        )
    if best != AUTOREGRESSIVE.name and best in theory.model.drafts:
        base = next(p for p in theory.predictions if p.architecture == best)
        least = theory.model.least_tokens_per_round(best, base.predicted_tpot_s)
        now = theory.model.drafts[best].per_round
        if least is not None:
            sentences.append(
                f"Prompts that commit fewer than {least:.2f} tokens a round (here {now:.2f}): plain decoding."
            )
    return sentences


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms"
