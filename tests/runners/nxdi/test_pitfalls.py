"""NxDI's pitfalls, each with what the runner does about it: what is sent, and what comes of it."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.runners.load_runner import Shape
from tandem.runners.protocol import PrefillRow, RowFailed
from tandem.speculation.types import Verdict
from tandem_nxdi.fused import UNKNOWN
from tests.rows import fused_row, propose_row, verify_row
from tests.runners.nxdi.runners import SHAPE, Bench, application, bench  # noqa: F401
from tests.support import GREEDY, SAMPLED, oracle

PROMPT = tuple(b"a prompt of twenty..")
K = SHAPE.max_draft + 1


def calls(since: int = 0) -> list[dict[str, Any]]:
    return application().calls[since:]


def truth(prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
    return oracle(prompt, GREEDY, count, past_the_end=True)


def test_a_mask_shows_the_tokens_before_the_window_and_no_others(bench: Bench) -> None:  # noqa: F811
    runner = bench.target()
    runner.prefill([PrefillRow(0, 0, PROMPT)])
    for _ in range(2):  # the second time stale tokens stand behind the position
        runner.verify([verify_row(0, len(PROMPT), 65, (1, 2, 3, 4), GREEDY)])
        (mask, *_) = calls()[-1]["attention_mask"].tolist()
        assert mask == [1] * len(PROMPT) + [0] * (len(mask) - len(PROMPT))


def test_a_verification_is_always_k_wide_and_short_drafts_are_padded(bench: Bench) -> None:  # noqa: F811
    runner = bench.target()
    runner.prefill([PrefillRow(0, 0, PROMPT)])
    expected = truth((*PROMPT, 65), K)
    for draft in ((), expected[:1], expected[:2], (*expected[:2], 0), expected[: K - 1]):
        (verdict,) = runner.verify([verify_row(0, len(PROMPT), 65, tuple(draft), GREEDY)])
        accepted = 2 if draft[2:] == (0,) else len(draft)
        assert verdict == Verdict(expected[: accepted + 1], accepted)
        assert {len(row) for row in calls()[-1]["input_ids"]} == {K}


def test_the_window_slides_back_at_the_end_of_a_line(bench: Bench) -> None:  # noqa: F811
    runner = bench.target()
    tokens = tuple(i % 200 + 1 for i in range(SHAPE.max_length))
    runner.prefill([PrefillRow(1, 0, tokens[:-1])])
    last = SHAPE.max_length - 1
    (verdict,) = runner.verify([verify_row(1, last, tokens[-1], (), GREEDY)])
    assert verdict.token_ids == truth(tokens, 1)
    assert calls()[-1]["position_ids"][1] == list(range(last + 1 - K, last + 1))
    assert calls()[-1]["input_ids"][1] == list(tokens[-K:])


def test_idle_sequences_keep_their_lines_whoever_else_decodes(bench: Bench) -> None:  # noqa: F811
    runner = bench.target()
    idle = tuple(range(1, 41))
    runner.prefill([PrefillRow(2, 0, idle), PrefillRow(0, 0, PROMPT)])
    for _ in range(6):
        runner.verify([verify_row(0, len(PROMPT), 65, (9,), SAMPLED)])
    assert application().caches["target"][2][: len(idle)] == list(idle)
    (verdict,) = runner.verify([verify_row(2, len(idle), 7, (), GREEDY)])
    assert verdict.token_ids == truth((*idle, 7), 1)


def test_an_idle_line_that_is_full_is_written_what_it_holds(bench: Bench) -> None:  # noqa: F811
    runner = bench.target()
    full = tuple(i % 99 + 1 for i in range(SHAPE.max_length))
    runner.prefill([PrefillRow(1, 0, full[:60]), PrefillRow(1, 60, full[60:]), PrefillRow(0, 0, PROMPT)])
    runner.verify([verify_row(0, len(PROMPT), 65, (9,), GREEDY)])
    assert application().caches["target"][1][: len(full)] == list(full)


def test_a_decode_call_holds_every_line_in_order_and_never_position_0(bench: Bench) -> None:  # noqa: F811
    runner = bench.target()
    runner.prefill([PrefillRow(slot, 0, PROMPT) for slot in (2, 0)])
    since = len(calls())
    verdicts = runner.verify([verify_row(slot, len(PROMPT), 60 + slot, (), GREEDY) for slot in (2, 0)])
    assert [v.token_ids for v in verdicts] == [truth((*PROMPT, 62), 1), truth((*PROMPT, 60), 1)]
    (call,) = calls(since)
    assert call["seq_ids"] == [0, 1, 2]
    assert min(map(min, call["position_ids"])) >= 1  # line 1 was never used


def test_a_prompt_of_one_token_is_never_read_from_a_pad(bench: Bench) -> None:  # noqa: F811
    runner = bench.target()
    expected = truth((65,), 3)
    (verdict,) = runner.verify([verify_row(1, 0, 65, expected[:2], GREEDY)])
    assert verdict == Verdict(expected, 2)
    runner.prefill([PrefillRow(1, 0, (65,))])
    assert calls()[-1]["input_ids"] == [[65, 65]]  # two tokens at least; the second is written over
    (verdict,) = runner.verify([verify_row(1, 1, 66, (), GREEDY)])
    assert verdict.token_ids == truth((65, 66), 1)


def test_what_a_context_encoding_does_not_hold_goes_on_in_windows(bench: Bench) -> None:  # noqa: F811
    prompt = tuple(i % 200 + 1 for i in range(50))
    for make in (bench.target, lambda **given: bench.draft(0.0, **given)):
        runner = make(neuron_config={"max_context_length": 20})
        assert runner.limits.chunk == 20
        for start in range(0, 49, 20):
            assert runner.prefill([PrefillRow(0, start, prompt[start : min(49, start + 20)])]) == [None]
        (verdict,) = runner.verify([verify_row(0, 49, prompt[-1], (), GREEDY)])
        assert verdict.token_ids == truth(prompt, 1)
        assert max(len(call["input_ids"][0]) for call in calls()) <= 20


def test_a_fused_step_needs_room_for_its_drafts_so_the_line_is_longer_than_a_sequence(bench: Bench) -> None:  # noqa: F811
    runner, _ = bench.pair()
    assert (runner.limits.max_length, runner.layout.capacity) == (64, 69)
    runner, _ = bench.pair(shape=Shape(3, 200, 4))
    assert runner.layout.capacity == 256  # whole tiles, which fused caches are stored in
    runner, _ = bench.pair(neuron_config={"seq_len": 64})
    assert runner.limits.max_length == 59


def test_accepted_tokens_are_counted_by_positions(bench: Bench) -> None:  # noqa: F811
    runner, draft = bench.pair(0.3)
    step = runner.fused_with(draft)
    assert step is not None and runner.fused_with(runner) is None
    runner.prefill([PrefillRow(0, 0, PROMPT)])
    (result,) = step([fused_row(propose_row(0, len(PROMPT), (65,), 4, GREEDY))])
    verdict, drafted = result.verdict, result.proposal.token_ids
    assert verdict.token_ids == truth((*PROMPT, 65), len(verdict.token_ids))
    assert drafted == (*verdict.token_ids[:-1], *[UNKNOWN] * (4 - verdict.accepted))
    assert (verdict.rows, verdict.width) == (1, K)


def test_a_plain_model_loads_after_a_fused_one_of_the_same_class(bench: Bench) -> None:  # noqa: F811
    bench.pair()
    assert type(application())._FUSED_PREFIX == "target_model"
    bench.target()
    assert application().prefix_at_load == ""


def test_a_fused_pair_of_two_vocabularies_is_refused_before_it_compiles(bench: Bench, monkeypatch) -> None:  # noqa: F811
    import json

    config = bench.model(miss=0.5) / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"vocab_size": 300}))
    with pytest.raises(ValueError, match="300 token ids, the target has 258"):
        bench.pair(0.5)


def test_a_position_that_was_never_written_fails_its_row_alone(bench: Bench) -> None:  # noqa: F811
    runner = bench.target()
    runner.prefill([PrefillRow(0, 0, PROMPT)])
    bad, good = runner.verify([verify_row(1, 30, 65, (), GREEDY), verify_row(0, len(PROMPT), 65, (), GREEDY)])
    assert isinstance(bad, RowFailed) and "position 30 of line 1" in str(bad)
    assert good.token_ids == truth((*PROMPT, 65), 1)
    (proposal,) = runner.propose([propose_row(1, 30, (65,), 2, GREEDY)])
    assert isinstance(proposal, RowFailed)
