"""Compares predictions with measurements: the `theory` of comparison.json."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tandem.comparison.analysis.bootstrap import Interval
from tandem.comparison.analysis.costs import ArchitectureCosts, costs_by_architecture
from tandem.comparison.analysis.drafts import Copied, Drafted, copied, drafted, rates_at_fixed
from tandem.comparison.analysis.predictions import (
    NOTES,
    NOTES_ON_AUTO,
    BestLength,
    Model,
    Prediction,
    best_length,
    crossing,
    curve,
)
from tandem.comparison.analysis.summary import Summary
from tandem.comparison.measuring import architectures as arch
from tandem.comparison.measuring.architectures import NOT_COSTED, Calibration
from tandem.comparison.measuring.conditions import BASE, LINK, Condition
from tandem.comparison.measuring.json_form import HIDDEN, decoded, encoded
from tandem.comparison.measuring.records import Measurement, Record
from tandem.comparison.report import formatting as fmt

NOUNS = {"draft": "drafting", "verify": "verification"}
MIN_CURVE_MS = 60.0
"""The least round trip up to which predictions are drawn."""


@dataclass(frozen=True, slots=True)
class Theory:
    """Predictions and the model behind them, in seconds."""

    model: Model = field(metadata=HIDDEN)
    predictions: tuple[Prediction, ...]
    curve: tuple[tuple[float, dict[str, float]], ...]
    best_lengths: tuple[BestLength, ...]
    break_even_rtt_s: float | None = None
    break_even_interval_s: Interval | None = None
    measured_break_even_rtt_s: float | None = None
    distributed_over_fused_s: float | None = None
    waiting_pays_until_s: float | None = None


def theory_of(
    conditions: Sequence[Condition],
    summaries: Mapping[str, Sequence[Summary]],
    records: Sequence[Record],
    found: Sequence[Calibration],
    length: int | None,
) -> Theory | None:
    """Predicts every link; None unless plain decoding and a drafting architecture were measured and calibrated.

    `length`: of drafts, None if it was chosen by measurement (auto).
    """
    model = _model(conditions[0], records, found, length)
    if model is None or not model.drafts:
        return None
    links = [c for c in conditions if c.varies in (BASE, LINK)]
    measured = {c.name: _mean_tpots(summaries[c.name]) for c in links}
    ran = {c.name: model if length is not None else _on(c, model, records) for c in links}
    names = [arch.AUTOREGRESSIVE.name, *model.drafts]
    derived = [arch.PIPELINED.name, arch.NEVER_WAITING.name] if arch.DISTRIBUTED.name in model.drafts else []
    predictions = tuple(
        Prediction(name, c.name, 1000 * c.link.seconds, ran[c.name].tpot(name, c.link), measured[c.name].get(name))
        for c in links
        if c.link.but.predictable
        for name in (*names, *derived)
    )
    even, interval = model.break_even_rtt(conditions[0].link) if derived else (None, None)
    longest = max(MIN_CURVE_MS, *(1000 * c.link.seconds for c in links), 1500 * (even or 0.0))
    base = measured[conditions[0].name]
    points = tuple(curve(model, [*names, *derived], conditions[0].link, longest))
    return Theory(
        model,
        predictions,
        points,
        tuple(best_length(model, name, c.link) for c in links if c.link.but.predictable for name in model.drafts),
        even,
        interval,
        _crossing(links, measured),
        _difference(base, arch.DISTRIBUTED.name, arch.FUSED.name),
        _waits_until(points),
    )


def _model(
    base: Condition, records: Sequence[Record], found: Sequence[Calibration], length: int | None
) -> Model | None:
    costs = costs_by_architecture(found, base.link)
    plain = costs.get(arch.WIDTH_1.name) or costs.get(arch.AUTOREGRESSIVE.name)
    if plain is None or length == 0:
        return None
    by_prompt = _by_prompt(base, records)
    drafts = {
        name: drafted(of)
        for name, of in by_prompt.items()
        if name in arch.COMPARED
        and name in costs
        and costs[name].draft_s_by_length
        and name not in NOT_COSTED
        and any(m.drafted for ms in of.values() for m in ms)
    }
    copies = copied([m for ms in by_prompt[arch.LOOKUP.name].values() for m in ms])
    fixed = {name: rates_at_fixed([c for c in found if c.architecture == name]) for name in drafts}
    plain_s = plain.verify_fixed_s + plain.verify_slope_s
    return Model(plain_s, costs, drafts, length, copies, fixed if length is None else {})


def _on(condition: Condition, model: Model, records: Sequence[Record]) -> Model:
    """Returns the model with the lengths and the tokens that rounds had under this condition, where it was measured."""
    found = _by_prompt(condition, records)
    return replace(model, drafts={n: drafted(found[n]) if found[n] else of for n, of in model.drafts.items()})


def _by_prompt(condition: Condition, records: Sequence[Record]) -> defaultdict[str, dict[str, list[Measurement]]]:
    """Returns the measurements with rounds under a condition, by architecture and prompt."""
    found: defaultdict[str, dict[str, list[Measurement]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        if record.condition == condition.name and record.measurement and record.measurement.rounds:
            found[record.architecture][record.prompt].append(record.measurement)
    return found


def _mean_tpots(summaries: Sequence[Summary]) -> dict[str, float]:
    means = {s.architecture: s.distributions["tpot_s"].mean for s in summaries}
    return {name: mean for name, mean in means.items() if mean is not None}


def _crossing(links: Sequence[Condition], measured: Mapping[str, Mapping[str, float]]) -> float | None:
    names = arch.DISTRIBUTED.name, arch.AUTOREGRESSIVE.name
    known = [(1000 * c.link.seconds, d) for c in links if (d := _difference(measured[c.name], *names)) is not None]
    at = crossing([rtt for rtt, _ in known], [difference for _, difference in known])
    return None if at is None else at / 1000


def _waits_until(points: Sequence[tuple[float, Mapping[str, float]]]) -> float | None:
    """Returns the round trip (seconds) up to which waiting for drafts is predicted to be faster than never waiting.

    None if no point of the curve is beyond it.
    """
    names = arch.NEVER_WAITING.name, arch.DISTRIBUTED.name
    return next((rtt_ms / 1000 for rtt_ms, tpots in points if (_difference(tpots, *names) or 0.0) < 0), None)


def _difference(tpots: Mapping[str, float], name: str, other: str) -> float | None:
    return tpots[name] - tpots[other] if name in tpots and other in tpots else None


def held_at_0(theory: Theory) -> list[str]:
    """Returns one sentence on the steps whose times could not be split, since one part came out below 0.

    comparison.json has the values under `fits`.
    """
    parts = [
        f"{NOUNS[step]} in {fmt.name_in_sentence(name)}"
        for name, costs in theory.model.costs.items()
        for step, fit in costs.fits.items()
        if fit.held is not None
    ]
    if not parts:
        return []
    return [
        f"Step times varied too much to be split into a part per round and a part per token ({', '.join(parts)}):"
        " predictions for other speculation lengths are rough."
    ]


def theory_as_json(theory: Theory) -> Any:
    model = theory.model
    names = (arch.AUTOREGRESSIVE.name, *model.drafts)
    found = {
        "costs": {  # plain decoding may have been calibrated at width 1 only
            "plain_s": model.plain_s,
            "architectures": {name: model.costs[name] for name in names if name in model.costs},
        },
        "acceptance": {
            name: {
                "conditional": of.rates,
                "tokens_per_round": of.per_round,
                "output_tokens": of.tokens,
                "rounds_by_length": of.rounds_by_length,
                "at_fixed_lengths": model.at_fixed.get(name),
            }
            for name, of in model.drafts.items()
        },
        "length": model.length,
        "copies": encoded(model.copies),
        "predictions": [{**encoded(p), "error": p.error, "missed": p.missed} for p in theory.predictions],
        "curve": [{"rtt_ms": rtt, "tpot_s": tpots} for rtt, tpots in theory.curve],
        "best_lengths": [{**encoded(b), "length": b.length, "tpot_s": b.tpot_s} for b in theory.best_lengths],
        "capacity_gain": model.capacity_gain(),
        "target_s_per_token": {name: model.target_seconds(name) for name in names},
        "notes": (*NOTES, *(NOTES_ON_AUTO if model.length is None else ())),
    }
    return encoded(theory) | encoded(found)


def model_from_json(theory: Mapping[str, Any]) -> Model:
    """Restores the model from the `theory` of a comparison.json."""
    costs = {
        name: decoded(ArchitectureCosts, {key: value for key, value in of.items() if key != "fits"})
        for name, of in theory["costs"]["architectures"].items()
    }
    accepted = theory["acceptance"].items()
    drafts = {
        name: Drafted(tuple(of["conditional"]), (), of["output_tokens"], tuple(of.get("rounds_by_length", ())))
        for name, of in accepted
    }
    fixed = {name: tuple(rates) for name, of in accepted if (rates := of.get("at_fixed_lengths")) is not None}
    copies = decoded(Copied, theory["copies"]) if theory.get("copies") else None
    return Model(theory["costs"]["plain_s"], costs, drafts, theory["length"], copies, fixed)
