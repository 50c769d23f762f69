"""What is decided and how sure that is: one object, which the page, the terminal and `advise` print."""

from __future__ import annotations

import io
import itertools
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from rich.console import Console

from tandem.comparison.analysis.comparison import Comparison, Measured, analyse, comparison_as_text
from tandem.comparison.analysis.summary import CLOSE, paired_interval
from tandem.comparison.analysis.verdict import Decision, Evidence, doubt
from tandem.comparison.measuring.machine import MachineLoad
from tandem.comparison.measuring.records import Measurement, Record, Seconds
from tandem.comparison.report.page import html
from tandem.comparison.report.printed import print_comparison, run_advice
from tests.comparison.fakes import MEASUREMENT, run_of

IDLE = MachineLoad(load_average=0.8, waiting=0, others=0.01, steal=0.0)
BUSY = MachineLoad(load_average=9.1, waiting=8, others=0.62, steal=0.0)
GOOD = Evidence(prompts=20, answers=20, timed_tokens=1260, interval=(1.6, 2.1), busy=0.01, steps_vary=1.1)
PAIR = {"autoregressive": 0.010, "fused": 0.006}


def answer(tpot_s: float, tokens: int = 64, network: float = 0.0) -> Measurement:
    seconds = Seconds(0.0, 0.002 * tokens, 0.0, network * tokens, 0.0, 0.0)
    return replace(
        MEASUREMENT, output_token_ids=(1,) * tokens, output_tokens=tokens, tpot_s=tpot_s if tokens > 1 else None,
        ttft_s=0.05, end_to_end_latency_s=0.05 + tpot_s * (tokens - 1), rounds=tokens, seconds_by_cause=seconds,
    )  # fmt: skip


def run(
    times: dict[str, float],
    prompts: int = 20,
    load: MachineLoad = IDLE,
    jitter: float = 0.02,
    tokens: int = 64,
    condition: str = "base",
) -> list[Record]:
    """Answers of architectures with these times per token, one prompt after another."""
    random = Random(1)
    return [
        Record(
            name, f"code/{i}", "code", 0, answer(tpot_s * random.gauss(1, jitter), tokens), condition=condition,
            machine_load=load,
        )
        for i in range(prompts)
        for name, tpot_s in times.items()
    ]  # fmt: skip


def comparison(
    records: Sequence[Record], connect: dict[str, str] | None = None, rtts: tuple[float, ...] = ()
) -> Comparison:
    measured = run_of(records, connect)
    return analyse(replace(measured, config=replace(measured.config, rtt_ms=rtts)))


def sentence(records: Sequence[Record]) -> tuple[str, str]:
    verdict = comparison(records).decision
    assert verdict is not None
    return verdict.sentence, verdict.sureness


def test_a_clear_winner_on_an_idle_machine_is_sure() -> None:
    found = comparison(run(PAIR)).decision
    assert found is not None and found.interval is not None and found.ratio is not None
    text = f"Here, use fused, draft and target in one server: {found.ratio:.2f} times as fast as plain decoding."
    assert (found.sentence, found.sureness) == (text, "sure")
    assert found.interval[0] < 1.667 < found.interval[1]
    assert "this machine had little else to do" in found.doubt.reasons


@pytest.mark.parametrize(
    ("records", "said", "sureness"),
    [
        (run(PAIR, prompts=2), "Here, nothing can be decided: prompts that were answered: 2, and 3", "noise"),
        (run(PAIR, load=BUSY), "Here, nothing can be decided: other programs wanted 100 % of this machine.", "noise"),
        (run(PAIR, tokens=2), "Here, nothing can be decided: only 20 tokens were timed.", "noise"),
        (run({**PAIR, "fused": 0.0099}, jitter=0.3), "Here, nothing can be decided: the 95 % interval (", "noise"),
        (run({**PAIR, "fused": 0.0099}), "Here, decode plainly: drafts save too little to matter.", "sure"),
        (run({**PAIR, "fused": 0.014}), "Here, decode plainly: drafts cost more than they save.", "sure"),
        (run({**PAIR, "lookup": 0.00602}), "Here, lookup or fused, too close to call: 1.6", "weak"),
    ],
)  # fmt: skip
def test_noise_ties_and_drafts_that_do_not_pay_are_told(records: list[Record], said: str, sureness: str) -> None:
    text, sure = sentence(records)
    assert text.startswith(said) and sure == sureness


@pytest.mark.parametrize(
    ("changed", "sureness", "reason"),
    [
        ({"prompts": 2}, "noise", "prompts that were answered: 2"),
        ({"answers": 5}, "weak", "only 5 answers"),
        ({"timed_tokens": 46}, "weak", "only 46 tokens were timed"),
        ({"interval": (0.9, 1.4)}, "noise", "the 95 % interval (0.90 to 1.40) leaves open"),
        ({"interval": None}, "noise", "there is no interval"),
        ({"interval": (0.98, 1.02)}, "sure", "20 answers"),
        ({"tie": True}, "weak", "the best are too close to call"),
        ({"busy": 0.2}, "weak", "other programs wanted 20 %"),
        ({"busy": 0.5}, "noise", "other programs wanted 50 %"),
        ({"steps_vary": 2.2}, "weak", "the slowest steps took 2.2 times"),
        ({"apart": "fused on 10.0.0.3 beside lookup on this machine"}, "weak", "fused on 10.0.0.3"),
    ],
)
def test_every_reason_to_doubt_is_given_in_plain_words(changed: dict[str, object], sureness: str, reason: str) -> None:
    found = doubt(replace(GOOD, **changed))  # type: ignore[arg-type]
    assert found.sureness.value == sureness and reason in found.reasons[0]
    assert bool(found.surer) == (sureness != "sure")


def test_servers_that_are_not_alike_are_named_first_and_never_sure() -> None:
    for address, where in (("10.0.0.3:50053", "on 10.0.0.3"), ("127.0.0.1:50053", "ran already")):
        found = comparison(run(PAIR), {"fused": address})
        assert found.decision and found.decision.sureness == "weak" and where in found.decision.doubt.reasons[0]
        assert f"fused at {address} ran already" in found.caveats[0]
    both = comparison(run(PAIR), {"autoregressive": "10.0.0.3:1", "fused": "10.0.0.3:2"})
    assert both.decision and both.decision.sureness == "sure"
    assert both.caveats == ("All servers ran on 10.0.0.3: how busy that machine was is not known here.",)
    assert comparison(run(PAIR)).caveats == ()


def test_a_draft_apart_pays_the_round_trip_once_a_round_and_never_less_than_nothing() -> None:
    base = [
        Record(name, f"code/{i}", "code", 0, answer(tpot_s, network=network), machine_load=IDLE)
        for i in range(9)
        for name, tpot_s, network in (("autoregressive", 0.01, 0.0), ("distributed", 0.006, 0.001))
    ]
    found = comparison(base, rtts=(20.0,))
    for rtt, chosen in ((0.0, "distributed"), (500.0, "autoregressive")):
        verdict = found.decide(rtt)
        assert verdict is not None and verdict.architecture == chosen and verdict.rtt_ms == rtt
    verdict = found.decide(0.0)
    assert verdict is not None and verdict.ratio == pytest.approx(0.01 / 0.005)  # less what the network took


@pytest.mark.parametrize(
    ("rtt", "clients", "said"), [(-1.0, 1, "rtt-ms: -1 is"), (1e9, 1, "rtt-ms"), (0.0, 0, "clients: 0")]
)
def test_what_cannot_be_asked_is_one_line(rtt: float, clients: int, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        comparison(run(PAIR)).decide(rtt, clients)


NAMES = ("autoregressive", "lookup", "distributed", "fused", "remote_draft")
SPLIT = ("distributed", "remote_draft")
IMPOSSIBLE = re.compile(r"below 0 ms|(?<![\w.])[-\N{MINUS SIGN}]\d[\d.]* ms")


def synthetic(seed: int) -> Comparison:
    """In turn: one winner, a tie, noise, lines that cross, missing architectures; each third with a load."""
    random, kind = Random(seed), seed % 5
    shown = random.sample(NAMES, random.randint(2, 4)) if kind == 4 else NAMES
    near = {name: random.uniform(0.005, 0.03) for name in shown}
    if kind == 1:
        near |= dict.fromkeys(random.sample(shown, 2), min(near.values()))
    if kind == 3:
        near["distributed"] = 0.8 * min(near.values())
    far = {name: tpot_s + (0.02 if name in SPLIT else 0.0) for name, tpot_s in near.items()}
    jitter, load = (random.choice((0.1, 0.5)), random.choice((IDLE, BUSY))) if kind == 2 else (0.01, IDLE)
    prompts = random.choice((2, 5, 20)) if kind == 2 else 20
    records = run(near, prompts, load, jitter) + run(far, prompts, load, jitter, condition="RTT 20 ms")
    if seed % 3 == 0:
        crowd = run({name: random.uniform(0.005, 0.03) for name in shown}, condition="concurrency 4")
        records += [replace(r, sent_s=0.0, ended_s=r.measurement and r.measurement.tpot_s) for r in crowd]
    measured = run_of(records)
    settings = {"rtt_ms": (0.0, 20.0), "concurrency": (4,), "max_num_completed_requests": 20}
    return analyse(replace(measured, config=replace(measured.config, **settings)))


REST = [pytest.param(range(start, start + 45), marks=pytest.mark.thorough) for start in range(20, 200, 45)]


@pytest.mark.parametrize("seeds", [range(20), *REST])
def test_page_terminal_and_advice_print_the_same_decision_and_it_agrees_with_the_records(
    seeds: range, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # plots take seconds
    for seed in seeds:
        found = replace(synthetic(seed), records=())
        screen = io.StringIO()
        print_comparison(found, Console(width=500, file=screen, color_system=None))
        page = html(found).replace("\N{NO-BREAK SPACE}", " ")
        (tmp_path / "comparison.json").write_text(comparison_as_text(found))
        questions = [*itertools.product((0.0, 20.0, 5.0, 300.0), (1, 4, 9))]
        for rtt, clients in (questions[0], questions[3], *Random(seed).sample(questions, 3)):
            capsys.readouterr()
            run_advice(tmp_path / "comparison.json", rtt, clients)
            advice, verdict = capsys.readouterr().out, found.decide(rtt, clients)
            assert verdict is not None and (verdict.rtt_ms, verdict.clients) == (rtt, clients)
            assert verdict.sentence in advice and f"How sure: {verdict.sureness}" in advice
            condition = next((m for m in found.conditions if is_of(m, rtt, clients)), None)
            assert verdict.condition == (condition.name if condition else ""), "what was measured is not predicted"
            if condition:
                assert verdict.sentence in page and verdict.sentence in screen.getvalue()
                agrees_with_its_numbers(verdict, condition)
            else:
                assert "(predicted)" in verdict.sentence or "nothing can be predicted" in verdict.sentence
                assert verdict.sureness == ("weak" if "(predicted)" in verdict.sentence else "noise")
            if (rtt, clients) == (5.0, 1):
                near, far = ({s.architecture: s.tpot_s or 0.0 for s in m.summaries} for m in found.links)
                between = {name: 0.75 * near[name] + 0.25 * (far if name in SPLIT else near)[name] for name in near}
                assert verdict.fastest == min(between, key=between.__getitem__)
            assert not IMPOSSIBLE.search(advice), advice
        assert not IMPOSSIBLE.search(screen.getvalue()) and not IMPOSSIBLE.search(page)


def is_of(measured: Measured, rtt_ms: float, clients: int) -> bool:
    return (measured.rtt_ms, measured.load.concurrency if measured.load else 1) == (rtt_ms, clients)


def agrees_with_its_numbers(verdict: Decision, condition: Measured) -> None:
    loaded = condition.load is not None
    rates = {
        s.architecture: s.mean_output_throughput_token_per_s if loaded else 1 / s.tpot_s
        for s in condition.summaries
        if s.tpot_s
    }
    best = max(rate or 0.0 for rate in rates.values())
    assert (rates[verdict.fastest] or 0.0) * (CLOSE if loaded else 1) >= best
    chosen, over = rates[verdict.architecture], rates[verdict.over]
    assert verdict.ratio == pytest.approx((chosen or 0.0) / (over or 1.0))
    ties = "too close to call" in verdict.sentence
    assert not (ties and verdict.sureness == "sure")
    if verdict.decided and verdict.architecture != "autoregressive":
        assert verdict.architecture == verdict.fastest
        assert ties == any(rival.tied for rival in verdict.rivals)
        assert f"{verdict.ratio:.2f} times" in verdict.sentence


def test_an_interval_holds_the_ratio_and_widens_with_fewer_prompts() -> None:
    random = Random(3)
    above, below = ([random.gauss(mean, 0.2) for _ in range(40)] for mean in (3.0, 2.0))
    wide, narrow = paired_interval(above[:4], below[:4]), paired_interval(above, below)
    assert wide and narrow and wide[0] < narrow[0] < 1.5 < narrow[1] < wide[1]
    assert paired_interval([1.0], [1.0]) is None and paired_interval([0.0, 0.0], [1.0, 1.0]) is None


def test_servers_of_other_weights_are_remarked() -> None:
    measured = run_of(run(PAIR))
    one, other = measured.endpoints
    odd = replace(other, model=replace(other.model, weights_revision="other", bit_exact=False))
    remarks = analyse(replace(measured, endpoints=(one, odd))).remarks
    assert remarks[0] == "weights_revision differs: autoregressive rev, fused other"
    assert remarks[1] == "not bit-exact on this device, outputs may differ where logits tie: fused"
