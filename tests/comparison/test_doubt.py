"""How sure a comparison is of what it says."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from tandem.comparison.analysis.doubt import RULES, Evidence, Sureness, doubt
from tandem.comparison.analysis.evidence import between
from tandem.comparison.analysis.run_analysis import analyse
from tandem.comparison.analysis.summary import summarize
from tandem.comparison.analysis.verdicts import Statement, Verdict, verdict
from tandem.comparison.links.settings import LinkSettings
from tandem.comparison.measuring.architectures import COMPARED
from tandem.comparison.measuring.conditions import Condition, plan
from tandem.comparison.measuring.machine_load import MachineLoad
from tandem.comparison.measuring.records import Measurement, Record
from tandem.comparison.report.files import comparison_as_json
from tandem.comparison.report.terminal import head_lines
from tests.comparison.fakes import ASKED, MEASUREMENT, run_of
from tests.comparison.report.example_comparison import example
from tests.daily import daily

ROOT = Path(__file__).resolve().parents[2]
IDLE = MachineLoad(load_average=0.8, waiting=0, others=0.01, steal=0.0)
LOAD_OF_8 = MachineLoad(load_average=9.1, waiting=8, others=0.62, steal=0.0)
GOOD = Evidence(
    prompts=20, answers=20, timed_tokens=1260, interval=(1.6, 2.1), early=0.0, others=0.01, waiting=0.0, steal=0.0,
    load_average=0.4, steps_vary=1.1, steps_drift=1.02, missed=1.03,
)  # fmt: skip


def answer(tpot_s: float, tokens: int = 64, step_s: float = 0.01) -> Measurement:
    seconds = replace(MEASUREMENT.seconds_by_cause, verify=step_s * tokens)
    whole = 0.05 + tpot_s * (tokens - 1)
    return replace(
        MEASUREMENT, output_token_ids=(1,) * tokens, output_tokens=tokens, tpot_s=tpot_s if tokens > 1 else None,
        ttft_s=0.05, end_to_end_latency_s=whole, rounds=tokens, seconds_by_cause=seconds,
    )  # fmt: skip


def run(
    times: dict[str, float], prompts: int = 20, load: MachineLoad | None = IDLE, jitter: float = 0.02, tokens: int = 64
) -> list[Record]:
    """Answers of architectures with these times per token, one prompt after another."""
    random = Random(1)
    return [
        replace(
            Record(name, f"code/{i}", "code", 0, answer(tpot_s * random.gauss(1, jitter), tokens)), machine_load=load
        )
        for i in range(prompts)
        for name, tpot_s in times.items()
    ]


def decided(
    records: Sequence[Record], connect: dict[str, str] | None = None, base: Condition | None = None
) -> tuple[Verdict, list[Statement]]:
    measured = run_of(records, connect)
    condition = base or plan(ASKED)[0]
    found = verdict(measured, condition, summarize(records, "autoregressive", None), None)
    assert found is not None
    return found


PAIR = {"autoregressive": 0.010, "fused": 0.006}


def test_a_default_run_on_an_idle_machine_is_sure() -> None:
    found, statements = decided(run(PAIR))
    assert found.headline == "Here, use fused: draft and target in one server"
    assert found.doubt.sureness is Sureness.SURE and not found.doubt.surer
    assert "this machine had little else to do" in found.doubt.reasons
    assert [one.text for one in statements] == [f"fused is {found.ratio:.2f} times as fast as plain decoding"]
    assert found.interval is not None and found.interval[0] < (found.ratio or 0.0) < found.interval[1]


def test_two_prompts_beside_a_load_of_8_are_noise_and_say_why() -> None:
    comparison = comparison_as_json(analyse(run_of(run(PAIR, prompts=2, load=LOAD_OF_8))))
    lines = [line for line, _ in head_lines(comparison)]
    assert lines[0] == "Here, nothing can be decided: too few prompts were measured."
    assert lines[1:5] == [
        "How sure: noise:",
        "  - prompts that were answered: 2, and 3 are needed to compare",
        "  - 4.0 threads of other programs wanted each core",
        "  - other programs had 62 % of this machine's processor time",
    ]
    surer = next(line for line in lines if line.startswith("To be surer"))
    assert surer == "To be surer: measure again with more prompts, on an idle machine."


def test_every_round_trip_that_was_asked_for_has_its_line() -> None:
    found = example()
    found["settings"]["rtts_ms"] = [0.0, 20.0, 50.0, 100.0, 200.0]
    found["verdicts"] = found["verdicts"][:3]
    lines = [line for line, _ in head_lines(found)]
    assert lines[lines.index("By link:") + 1 :][:5] == [
        "  RTT 0 ms: fused, 1.80 times as fast as plain decoding (sure)",
        "  RTT 20 ms: fused, 1.80 times as fast as plain decoding (sure)",
        "  RTT 50 ms: fused, 1.80 times as fast as plain decoding (weak)",
        "  RTT 100 ms: not decided (fewer than two architectures answered)",
        "  RTT 200 ms: not measured",
    ]


def test_many_prompts_beside_a_load_of_8_are_noise_too() -> None:
    found, _ = decided(run(PAIR, load=LOAD_OF_8))
    assert found.headline == "Here, nothing can be decided: this machine was busy"
    assert found.line.startswith("not emulated: not decided (4.0 threads of other programs wanted each core)")


def test_the_ratios_stand_below_the_headline_also_if_nothing_is_decided() -> None:
    comparison = comparison_as_json(analyse(run_of(run(PAIR, load=LOAD_OF_8))))
    lines = [line for line, _ in head_lines(comparison)]
    assert lines[-1].startswith("Not to be relied on: On this link (not emulated) fused is 1.6")


@pytest.mark.parametrize(
    ("changed", "sureness", "reason"),
    [
        ({"prompts": 2}, "noise", "prompts that were answered: 2"),
        ({"answers": 5}, "weak", "only 5 answers"),
        ({"waiting": 0.5}, "weak", "0.5 threads"),
        ({"waiting": 2.0}, "noise", "2.0 threads"),
        ({"others": 0.2}, "weak", "other programs had 20 %"),
        ({"others": 0.5}, "noise", "other programs had 50 %"),
        ({"steal": 0.05}, "weak", "the host of this virtual machine took 5 %"),
        ({"steal": 0.2}, "noise", "took 20 %"),
        ({"others": None, "waiting": None, "load_average": 4.0}, "noise", "the load average was 4.0 for each core"),
        ({"load_average": 4.0}, "sure", "20 answers"),
        ({"early": 0.3}, "weak", "30 % of the answers ended under 8 tokens"),
        ({"early": 0.8}, "noise", "80 % of the answers"),
        ({"timed_tokens": 46}, "weak", "only 46 tokens were timed"),
        ({"missed": 1.68}, "weak", "predictions from step times are off by a factor of 1.68"),
        ({"missed": 4.28}, "noise", "off by a factor of 4.28"),
        ({"steps_vary": 2.2}, "weak", "the slowest steps took 2.2 times as long as the fastest"),
        ({"steps_drift": 1.6}, "noise", "steps changed by a factor of 1.60"),
        ({"interval": (0.9, 1.4)}, "noise", "the 95 % interval (0.90 to 1.40) leaves open which is faster"),
        ({"interval": None}, "noise", "the 95 % interval (none)"),
        ({"interval": (0.98, 1.02)}, "sure", "20 answers"),
        ({"apart": "fused on 10.0.0.3 is compared with distributed on this machine"}, "weak", "fused on 10.0.0.3"),
        ({"predicted": True}, "weak", "predicted, not measured"),
        ({"once": True}, "weak", "measured in one pass"),
    ],
)
def test_every_reason_to_doubt_is_given_in_plain_words(changed: dict[str, object], sureness: str, reason: str) -> None:
    found = doubt(replace(GOOD, **changed))  # type: ignore[arg-type]
    assert found.sureness.value == sureness
    assert found.reasons[0].startswith(reason) or reason in found.reasons[0]
    assert bool(found.surer) == bool(found.brief) == (sureness != "sure")


def test_nothing_known_raises_no_doubt_and_every_rule_can_be_crossed() -> None:
    assert doubt(Evidence()).sureness is Sureness.SURE
    assert all(rule.weak is not None or rule.noise is not None for rule in RULES)
    assert all(len(rule.brief.split()) <= 5 for rule in RULES)


def test_the_page_has_the_limits_of_every_rule() -> None:
    section = (ROOT / "docs" / "comparison.md").read_text().split("## How sure it is")[1].split("##")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]
    told = sorted((limit(weak), limit(noise)) for _, weak, noise in rows[2:] if "yes" not in (weak, noise))
    rules = [rule for rule in RULES if {rule.weak, rule.noise} != {0.5, None}]  # those are yes or no
    assert told == sorted((rule.weak or 0.0, rule.noise or 0.0) for rule in rules)


def limit(cell: str) -> float:
    """The figure of a cell such as "over 10 %"; 0 for an empty one."""
    share = 0.01 if "%" in cell else 1.0
    return round(float(cell.split()[1]) * share, 4) if cell else 0.0


PAIRS = list(itertools.permutations(COMPARED, 2))


@pytest.mark.parametrize(("best", "second"), daily(PAIRS, *range(0, len(PAIRS), 5)))
def test_a_headline_has_at_most_twelve_words(best: str, second: str) -> None:
    base = replace(plan(ASKED)[0], link=LinkSettings(1000.5))
    for jitter, load in ((0.02, IDLE), (0.6, IDLE), (0.02, LOAD_OF_8)):
        names = {best: 0.005, second: 0.0052, "autoregressive": 0.02} | (
            {"autoregressive": 0.005} if best == "autoregressive" else {}
        )
        found, _ = decided(run(names, 8, load, jitter), base=base)
        assert 3 <= len(found.headline.split()) <= 12, found.headline


def test_drafts_that_save_next_to_nothing_are_not_worth_it() -> None:
    found, _ = decided(run({"autoregressive": 0.01, "fused": 0.0099}, jitter=0.005))
    assert found.headline == "Here, decode plainly: drafts save too little to matter"
    assert (found.architecture, found.doubt.sureness) == ("autoregressive", Sureness.SURE)


def test_what_cannot_be_told_apart_is_said_to_be_too_close() -> None:
    found, _ = decided(run({"autoregressive": 0.01, "fused": 0.006, "remote_draft": 0.00602}))
    assert found.headline == "Here, remote draft or fused: too close to call"
    assert found.doubt.sureness is Sureness.SURE


def test_answers_that_end_at_once_are_noise() -> None:
    found, _ = decided(run(PAIR, tokens=4))
    assert found.doubt.sureness is Sureness.NOISE
    assert "100 % of the answers ended under 8 tokens" in found.doubt.reasons
    remarks = analyse(run_of(run(PAIR, tokens=4))).remarks
    assert any(remark.startswith("40 of 40 answers ended under 8 tokens") for remark in remarks)


def test_steps_that_slow_down_during_the_run_raise_a_doubt() -> None:
    records = run(PAIR)
    late = {f"code/{i}" for i in range(10, 20)}
    slowed = [
        replace(r, measurement=answer(r.measurement.tpot_s or 0.0, step_s=0.014))
        if r.prompt in late and r.measurement
        else r
        for r in records
    ]
    evidence = between(run_of(slowed), "base", ("fused", "autoregressive"), (1.5, 1.8), None)
    assert evidence.steps_drift == pytest.approx(1.4)
    assert "steps changed by a factor of 1.40 during the run" in doubt(evidence).reasons


def test_a_connected_server_beside_those_started_here_is_said_first_and_never_sure() -> None:
    for address, where in (("10.0.0.3:50053", "on 10.0.0.3"), ("127.0.0.1:50053", "ran already")):
        connect = {"fused": address}
        found, _ = decided(run(PAIR), connect)
        assert found.doubt.sureness is Sureness.WEAK and where in found.doubt.reasons[0]
        lines = [line for line, _ in head_lines(comparison_as_json(analyse(run_of(run(PAIR), connect))))]
        assert lines[0].startswith(f"Note: Not all servers were started alike: fused at {address} ran already;")
        assert "prefix sharing" in lines[0]


def test_servers_that_are_all_connected_on_one_machine_can_be_sure_with_a_caveat() -> None:
    connect = {"autoregressive": "10.0.0.3:1", "fused": "10.0.0.3:2"}
    found, _ = decided(run(PAIR), connect)
    assert found.doubt.sureness is Sureness.SURE
    (caveat,) = analyse(run_of(run(PAIR), connect)).caveats
    assert caveat == "All servers ran on 10.0.0.3: how busy that machine was is not known here."


def test_servers_that_are_all_started_here_need_no_caveat() -> None:
    assert analyse(run_of(run(PAIR))).caveats == []
