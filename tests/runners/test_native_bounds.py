"""The edge of the native library: what lies outside a model fails its own row, or its call, and never the process."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import c_double
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tandem.runners.fused_step import fused
from tandem.runners.native import NativeUnavailable
from tandem.runners.native.compilation import SOURCES
from tandem.runners.native.library import FAULTS, OutOfBounds, RowBatch, ints, zeros
from tandem.runners.native.native_runner import NativeRunner
from tandem.runners.protocol import FusedResult, PrefillRow, Proposal, ProposeRow, RowFailed, VerifyRow
from tandem.speculation.types import Rule, SamplingParams, Verdict
from tests.rows import changed, fill, fused_row, propose_row, verify_row
from tests.runners.test_native import GREEDY, SLOTS, VOCAB, module_of, native, sequence

SAMPLED = SamplingParams(temperature=0.9, seed=4)
FAR = (-1, -(2**31), 2**31 - 1)
TOKENS = (VOCAB, *FAR, 2**31, 2**32 - 1, 2**63 - 1)
"""Token ids as a verdict may hold them; ctypes keeps their lowest 32 bits."""


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def target() -> NativeRunner:
    return native(module_of())


@pytest.fixture(scope="module")
def draft() -> NativeRunner:
    return native(module_of("qwen3"), verifies=False)


def length_of(runner: NativeRunner) -> int:
    return int(runner.model.sizes.length)


def wrong_prefills(runner: NativeRunner) -> list[PrefillRow]:
    sound = PrefillRow(1, 0, (1, 2, 3))
    return [
        *(replace(sound, tokens=(1, token, 3)) for token in TOKENS),
        *(replace(sound, slot=slot) for slot in (SLOTS, *FAR)),
        *(replace(sound, start=start) for start in (length_of(runner) - 2, *FAR)),
        *(replace(sound, adapter=adapter) for adapter in (1, *FAR)),
        replace(sound, tokens=()),
        replace(sound, tokens=(1,) * (runner.model.most_tokens + 1)),
    ]


def wrong_verifications(runner: NativeRunner) -> list[VerifyRow]:
    sound = verify_row(1, 5, 7, (8, 9), GREEDY)
    return [
        *(replace(sound, last_token=token) for token in TOKENS),
        *(replace(sound, draft=(8, token)) for token in TOKENS),
        *(replace(sound, slot=slot) for slot in (SLOTS, *FAR)),
        *(replace(sound, position=at) for at in (length_of(runner) - 2, *FAR)),
        *(replace(sound, adapter=adapter) for adapter in (1, *FAR)),
        replace(sound, draft=(8,) * runner.model.most_tokens),
        changed(sound, last_token=VOCAB, sampling=SAMPLED),
    ]


def wrong_proposals(runner: NativeRunner) -> list[ProposeRow]:
    sound = propose_row(1, 5, (7, 8), 4, GREEDY)
    return [
        *(replace(sound, tail=(7, token)) for token in TOKENS),
        *(replace(sound, slot=slot) for slot in (SLOTS, *FAR)),
        *(replace(sound, position=at) for at in (length_of(runner) - 3, 0, *FAR)),
        *(replace(sound, adapter=adapter) for adapter in (1, *FAR)),
        replace(sound, k=-1),
        replace(sound, tail=()),
        changed(sound, tail=(7, VOCAB), sampling=SAMPLED),
    ]


def check_alone(step: Callable[[Sequence[Any]], Sequence[Any]], sound: Any, wrong: Sequence[Any], kind: type) -> None:
    """Each wrong row fails, alone and beside a sound one, whose result is what it is without it."""
    (expected,) = step([sound])
    assert isinstance(expected, kind)
    for row in wrong:
        (failed,) = step([row])
        assert isinstance(failed, RowFailed), row
        for rows in ([row, sound], [sound, row], [row, row, sound]):
            for asked, got in zip(rows, step(rows), strict=True):
                if asked is sound:
                    assert untimed(got) == untimed(expected), row
                else:
                    assert isinstance(got, RowFailed), row


def untimed(result: Any) -> Any:
    return result.token_ids if isinstance(result, Proposal) else result


def test_rows_of_a_prompt_that_are_out_of_bounds_fail_alone(target: NativeRunner) -> None:
    check_alone(target.prefill, PrefillRow(0, 0, (4, 5, 6)), wrong_prefills(target), type(None))


def test_verifications_that_are_out_of_bounds_fail_alone(target: NativeRunner) -> None:
    for slot in (0, 1):
        fill(target, slot, sequence(30))
    for sound in (verify_row(0, 5, 7, (8, 9), GREEDY), verify_row(0, 5, 7, (8, 9), SAMPLED, logprobs=3)):
        check_alone(target.verify, sound, wrong_verifications(target), Verdict)


def test_proposals_that_are_out_of_bounds_fail_alone(draft: NativeRunner) -> None:
    for slot in (0, 1):
        fill(draft, slot, sequence(30))
    for sound in (propose_row(0, 5, (7, 8), 4, GREEDY), propose_row(0, 5, (7, 8), 4, SAMPLED, Rule.REJECTION)):
        check_alone(draft.propose, sound, wrong_proposals(draft), Proposal)


def test_what_is_in_bounds_to_the_last_position_is_computed(target: NativeRunner, draft: NativeRunner) -> None:
    last = length_of(target) - 1
    assert isinstance(target.verify([verify_row(2, last - 2, VOCAB - 1, (0, VOCAB - 1), GREEDY)])[0], Verdict)
    assert target.prefill([PrefillRow(2, last - 2, (0, 0, VOCAB - 1))]) == [None]
    (proposal,) = draft.propose([propose_row(2, last - 3, (0, VOCAB - 1), 4, GREEDY)])
    assert isinstance(proposal, Proposal) and len(proposal.token_ids) == 4


def test_a_fused_round_whose_draft_is_out_of_bounds_is_verified_without_it(
    target: NativeRunner, draft: NativeRunner
) -> None:
    """A draft model may have a smaller vocabulary than its target, whose tokens it then cannot read."""
    small = native(module_of(vocab_size=100), verifies=False)
    for runner in (target, draft):
        for slot in (0, 1):
            fill(runner, slot, sequence(30))
    rows = [fused_row(propose_row(slot, 5, (7, 180 + slot), 3, GREEDY)) for slot in (0, 1)]
    (alone,) = target.verify([verify_row(0, 5, 180, (), GREEDY)])
    unread, drafted = fused(target, small)([rows[0]]), fused(target, draft)(rows)
    for got in unread:
        assert isinstance(got, FusedResult) and "outside the vocabulary" in got.draft_failed
        assert not got.proposal.token_ids and got.verdict.token_ids == alone.token_ids  # type: ignore[union-attr]
    assert all(isinstance(got, FusedResult) and got.proposal.token_ids for got in drafted)


def test_fused_rounds_that_the_target_cannot_make_fail_alone(target: NativeRunner, draft: NativeRunner) -> None:
    for runner in (target, draft):
        for slot in (0, 1):
            fill(runner, slot, sequence(30))
    sound = fused_row(propose_row(0, 5, (7, 8), 3, GREEDY))
    bad = fused_row(propose_row(1, 5, (7, 8), 3, GREEDY))
    wrong = [
        *(replace(bad, propose=replace(bad.propose, tail=(token,), k=0)) for token in TOKENS),
        *(replace(bad, propose=replace(bad.propose, slot=slot)) for slot in (SLOTS, *FAR)),
        *(replace(bad, propose=replace(bad.propose, position=at)) for at in (length_of(target), -5)),
        *(replace(bad, adapter=adapter) for adapter in (1, -1)),
    ]
    (expected,) = fused(target, draft)([sound])
    for row in wrong:
        got, failed = fused(target, draft)([sound, row])
        assert isinstance(failed, RowFailed), row
        assert isinstance(got, FusedResult) and got.proposal.token_ids == expected.proposal.token_ids  # type: ignore[union-attr]
        assert got.verdict.token_ids == expected.verdict.token_ids  # type: ignore[union-attr]


def test_the_library_itself_refuses_counts_that_its_caller_has_no_room_for(
    target: NativeRunner, draft: NativeRunner
) -> None:
    tails = RowBatch([0, 1], [0, 0], [[1, 2], [3]])
    propose = draft.model.library.tandem_propose
    for counts in ([2, 4], [2, -1], [2, 2**31 - 1]):
        with pytest.raises(OutOfBounds, match="row 1: its number of draft tokens") as raised:
            propose(draft.model.handle, ctypes.byref(tails.rows), ints(counts), None, 3, zeros(6), None)
        assert raised.value.row == 1
    for quiet in (3, -1, 2**31 - 1):
        tails.rows.quiet = ints([quiet, 0])
        with pytest.raises(OutOfBounds, match="row 0: its number of"):
            target.model.library.tandem_verify(target.model.handle, tails.rows, None, zeros(3), zeros(2), None)
    for counts, given, known in (([2, 9], [0, 0], VOCAB), ([1, 1], [0, 1], VOCAB), ([1, 1], [0, 0], VOCAB + 1)):
        drafts = ints([-5] * 6)
        with pytest.raises(OutOfBounds):
            target.model.library.tandem_fused(
                draft.model.handle,
                target.model.handle,
                ctypes.byref(tails.rows),
                ints(counts),
                ints(given),
                None,
                None,
                known,
                3,
                drafts,
                None,
                zeros(8),
                zeros(2),
                None,
                None,
                ctypes.byref(c_double()),
            )


def test_rows_of_lists_that_differ_in_length_are_refused() -> None:
    for lists in (([0], [0, 0], [[1], [2]]), ([0, 0], [0], [[1], [2]])):
        with pytest.raises(ValueError, match="each has a slot"):
            RowBatch(*lists)
    for more in ({"adapters": [1]}, {"feature_counts": [1]}):
        with pytest.raises(ValueError, match="each has a slot"):
            RowBatch([0, 0], [0, 0], [[1], [2]], **more)  # type: ignore[arg-type]


def test_pages_slots_and_products_out_of_bounds_are_refused(target: NativeRunner) -> None:
    model, store = target.model, target.page_store(3)
    pages = length_of(target) // 16
    for slot, first, which in ((SLOTS, 0, [0]), (-1, 0, [0]), (0, -1, [0]), (0, pages, [0]), (0, 2**31 - 1, [0, 1])):
        for copy in (store.save, store.load):
            with pytest.raises(OutOfBounds):
                copy(slot, first, which)
    for which in ([3], [-1], [0, 2**31 - 1]):
        with pytest.raises(OutOfBounds, match="does not fit"):
            store.load(0, 0, which)
    store.save(0, pages - 1, [2])
    for slot, positions in ((SLOTS, 0), (-1, 0), (0, -1)):
        with pytest.raises(OutOfBounds):
            model.give_back(slot, positions)
    with pytest.raises(OutOfBounds):
        model.library.tandem_encode(99, 1, 32, np.zeros(32, np.float32).ctypes.data, np.zeros(64, np.uint8).ctypes.data)
    with pytest.raises(OutOfBounds):
        model.library.tandem_hand_out(model.handle, ints([3]), 1, None)
    with pytest.raises(NativeUnavailable, match="does not have"):
        model.done(model.library.tandem_set_layer(model.handle, 2, None))
    rows = (ctypes.c_void_p * 1)(np.zeros(8, np.float32).ctypes.data)
    for count, top in ((0, 0), (8, 9), (8, -1)):
        with pytest.raises(OutOfBounds):
            model.library.tandem_logprobs(model.threads.handle, rows, 1, count, top, (c_double * 1)(), zeros(9))


def test_every_fault_of_the_library_has_a_name() -> None:
    (line,) = [line for line in (SOURCES / "api.cpp").read_text().splitlines() if line.startswith("enum Fault")]
    sound, *faults, base = line.removeprefix("enum Fault { ").removesuffix(" };").split(", ")
    assert (sound, base) == ("SOUND", "FAULTS = 16") and len(faults) == len(FAULTS) < 16
