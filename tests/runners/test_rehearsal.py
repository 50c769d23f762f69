"""Rehearsed steps: the same results as without, after the time of another device; late ones are counted."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tandem.host.device_times import DeviceTimes, StepTime, StepTimes, presets, read_times, text_of, times_named
from tandem.runners.fused_step import fused
from tandem.runners.protocol import FusedRow, Limits, PrefillRow, ProposeRow, Runner, VerifyRow
from tandem.runners.rehearsal import rehearsed
from tandem.speculation.types import Request, SamplingParams
from tests.toy import ToyConfig, ToyRunner

ASKED = Request(SamplingParams())
LIMITS = Limits(slots=4, max_length=64, max_draft=5, chunk=16, vocab_size=258)
PROMPT = tuple(b"a prompt")


def device(target_ms: float = 1.0, draft_ms: float = 1.0) -> DeviceTimes:
    parts = {part: StepTimes((StepTime(ms),), part) for part, ms in (("target", target_ms), ("draft", draft_ms))}
    return DeviceTimes("a name", "a device", "a test", **parts)


def runner(verifies: bool = True, step_seconds: float = 0.0, times: DeviceTimes | None = None) -> Runner:
    made = ToyRunner(LIMITS, ToyConfig(step_seconds=step_seconds))
    made.warm_up()
    return rehearsed(made, times or device(), verifies)


def fill(*runners: Runner) -> None:
    for each in runners:
        assert each.prefill([PrefillRow(0, 0, PROMPT[:-1])]) == [None]


def verification(draft: tuple[int, ...] = ()) -> VerifyRow:
    return VerifyRow(0, len(PROMPT) - 1, PROMPT[-1], draft, ASKED)


def proposal(k: int = 3) -> ProposeRow:
    return ProposeRow(0, len(PROMPT) - 1, PROMPT[-1:], k, ASKED)


# --- the times ---


def test_rows_that_were_measured_are_told_from_widths() -> None:
    grid = {(1, 1): 10.0, (5, 1): 12.0, (1, 4): 20.0, (5, 4): 30.0}
    steps = StepTimes(tuple(StepTime(ms, width, rows) for (width, rows), ms in grid.items()))
    for (width, rows), ms in grid.items():
        assert steps.seconds(width, rows) == pytest.approx(ms / 1000)
    assert steps.seconds(3, 1) == pytest.approx(0.011)
    assert 0.011 < steps.seconds(3, 2) < 0.025
    assert steps.seconds(1, 8) == steps.seconds(2, 4)  # more rows than were measured


def test_length_is_interpolated_and_its_ends_are_kept() -> None:
    steps = StepTimes((StepTime(10, 1, 1, 100), StepTime(14, 1, 1, 500)))
    found = [steps.seconds(1, 1, length) for length in (0, 100, 300, 500, 9000)]
    assert found == pytest.approx([0.010, 0.010, 0.012, 0.014, 0.014])


@pytest.mark.parametrize("name", presets())
def test_every_preset_says_where_it_is_from_and_survives_its_own_file(name: str, tmp_path: Path) -> None:
    preset = times_named(name)
    assert preset.target and preset.source and preset.assumed
    file = tmp_path / "times.json"
    file.write_text(text_of(preset))
    assert times_named(str(file)) == preset


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "Expecting property name"),
        ("[]", '"format" is not'),
        ('{"format": "tandem-step-times-1"}', "name: is empty"),
        ('{"format": "tandem-step-times-1", "speed": 1}', "'speed' is not one of"),
        ('{"format": "tandem-step-times-1", "name": "a", "device": "b", "source": "c"}', "neither target nor draft"),
        ('"target": {"steps": []}', "target: steps: no step is given"),
        ('"target": {"steps": 3}', "target: steps: 3 is not a list"),
        ('"target": {"steps": [{"width": 1}]}', "is not an object of ms"),
        ('"target": {"steps": [{"ms": 1, "width": 1.5}]}', "width: 1.5 is not a whole number"),
        ('"draft": {"steps": [{"ms": 0}]}', "draft: steps: ms: 0 is not"),
        ('"draft": {"steps": [{"ms": "fast"}]}', "draft: steps:"),
    ],
)
def test_a_file_that_is_wrong_is_refused_in_one_line(text: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "times.json"
    head = '{"format": "tandem-step-times-1", "name": "a", "device": "b", "source": "c", '
    file.write_text(text if text[0] in "{[" else head + text + "}")
    with pytest.raises(ValueError, match=r".*") as error:
        read_times(file)
    assert said in str(error.value) and str(file) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_name_that_is_neither_preset_nor_file_is_refused() -> None:
    with pytest.raises(ValueError, match="neither a file nor one of h100-llama-8b"):
        times_named("trn9")


# --- the runner ---


def test_a_step_takes_the_devices_time_and_its_result_is_the_same() -> None:
    plain, slow = ToyRunner(LIMITS), runner(times=device(target_ms=30))
    fill(plain, slow)
    began = time.monotonic()
    found = slow.verify([verification((1, 2))])
    assert time.monotonic() - began >= 0.030
    assert found == plain.verify([verification((1, 2))])


def test_drafting_takes_a_step_for_each_token_and_says_so() -> None:
    draft = runner(verifies=False, times=device(draft_ms=10))
    fill(draft)
    began = time.monotonic()
    (found,) = draft.propose([proposal(3)])
    assert time.monotonic() - began >= 0.030
    assert found.seconds == pytest.approx(0.030)  # type: ignore[union-attr]


def test_a_step_that_is_slower_here_is_counted_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    slow = runner(step_seconds=0.02, times=device(target_ms=1))
    fill(slow)
    for _ in range(3):
        slow.verify([verification()])
    told = slow.identity.rehearsal
    assert told and (told.steps, told.late_steps) == (4, 4)
    assert told.late_seconds > 3 * 0.015
    assert [r.message for r in caplog.records if "rehearsed late" in r.message][1:] == []


def test_a_fused_step_takes_a_draft_and_a_verification() -> None:
    times = device(target_ms=20, draft_ms=5)
    target, draft = runner(times=times), runner(verifies=False, times=times)
    fill(target, draft)
    step = fused(target, draft)
    began = time.monotonic()
    (found,) = step([FusedRow(proposal(2))])
    assert time.monotonic() - began >= 0.030
    alone, other = ToyRunner(LIMITS), ToyRunner(LIMITS)
    fill(alone, other)
    (expected,) = fused(alone, other)([FusedRow(proposal(2))])
    assert found.verdict == expected.verdict  # type: ignore[union-attr]


def test_the_device_is_labelled_wherever_it_is_told() -> None:
    told = runner(times=times_named("trn2-llama-8b")).identity
    assert told.device == "trn2.3xlarge with Llama-3.1-8B, rehearsed on toy"
    assert told.rehearsal and "vllm-neuron" in told.rehearsal.source and "assumed" in told.rehearsal.source
