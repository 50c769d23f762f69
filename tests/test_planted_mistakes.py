"""Plants plausible mistakes in functions, one at a time; the named test must fail with each and pass without it.

Mistakes in the algorithm are in tests/speculation, mistakes against the guarantees in tests/reliability.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.planting import PlaceGone, function_at, planted
from tests.support import HANG, REPOSITORY


@dataclass(frozen=True, slots=True)
class Mistake:
    """Replaces `old` by `new` in the function `where`; `caught_by` (file::function, called with `arguments`) fails."""

    name: str
    where: str
    old: str
    new: str
    caught_by: str
    arguments: tuple[object, ...] = ()

    def check(self) -> Callable[[], object]:
        file, _, function = self.caught_by.partition("::")
        module = importlib.import_module(f"tests.{file.removesuffix('.py').replace('/', '.')}")
        return lambda: getattr(module, function)(*self.arguments)


MISTAKES = (
    Mistake(
        "slots come back in any order",
        "tandem.engine.slots:SlotPool.release",
        "bisect.insort(self._free, slot)",
        "self._free.append(slot)",
        "engine/test_slots.py::test_the_lowest_free_slot_is_handed_out",
    ),
    *(
        Mistake(name, f"tandem.engine.{where}", old, new, f"engine/test_kv_memory.py::{by}", arguments)
        for name, where, old, new, by, arguments in (
            (
                "memory is not freed with its slot",
                "slots:SlotPool.release",
                "self.memory.release(slot)",
                "pass",
                "test_a_freed_slot_frees_what_it_reserved",
                (),
            ),
            (
                "a sequence is admitted beside others that leave too little memory",
                "kv_memory:KVMemory.fits",
                "self.reserved + ",
                "",
                "test_a_sequence_waits_until_its_own_length_fits_beside_the_others",
                (),
            ),
            (
                "pages of freed slots are not counted",
                "kv_memory:KVMemory.take",
                "while self.held > self.limit and self._kept:",
                "while False:",
                "test_many_short_sequences_and_a_long_one_say_the_same_within_the_memory_of_two",
                (False,),
            ),
            (
                "pages go back under a row that runs",
                "kv_memory:KVMemory.take",
                "free = next(iter(self._kept))\n        del self._kept[free]",
                "free = next(iter(self._reserved))\n        self._kept.popitem()",
                "test_many_short_sequences_and_a_long_one_say_the_same_within_the_memory_of_two",
                (False,),
            ),
            (
                "a shorter sequence leaves its slot the pages of a longer one",
                "kv_memory:KVMemory.take",
                "> bytes_needed",
                "< 0",
                "test_freed_pages_stay_until_others_need_them_and_the_longest_free_go_first",
                (),
            ),
            (
                "pages go back while the last step of their sequence runs",
                "kv_memory:limit_kv_memory",
                "batcher.between_steps(functools.partial(runner.give_back, slot, tokens))",
                "runner.give_back(slot, tokens)",
                "test_pages_go_back_only_after_the_step_that_may_still_write_them",
                (),
            ),
            (
                "who comes later passes who waits for memory",
                "slots:SlotPool.acquire",
                "and not self._held_back(place)",
                "",
                "test_a_long_sequence_is_not_passed_by_short_ones_that_came_later",
                (),
            ),
            (
                "who left for a moment loses the memory",
                "slots:SlotPool._next",
                "if self.memory and",
                "if False and",
                "test_a_long_opening_that_comes_back_finds_its_place_before_short_ones",
                (),
            ),
            (
                "who left for good holds others back",
                "slots:SlotPool._turn",
                "self._serve()",
                "pass",
                "test_who_leaves_for_good_holds_nobody_back",
                (None,),
            ),
            (
                "a sequence reserves its prompt alone",
                "sequences:LocalVerifier.open",
                "self._extent.tokens(len(prompt))",
                "len(prompt)",
                "test_many_short_sequences_and_a_long_one_say_the_same_within_the_memory_of_two",
                (False,),
            ),
        )
    ),
    Mistake(
        "chunks of prompts run one after the other while rounds wait",
        "tandem.engine.batcher:Batcher._first",
        "if self._prefilled else",
        "if False else",
        "engine/test_batcher.py::test_newcomers_prefill_one_chunk_at_a_time_between_the_rounds_of_others",
    ),
    Mistake(
        "a prompt waits for as long as anybody has rounds",
        "tandem.engine.batcher:Batcher._first",
        "if self._prefilled else",
        "if True else",
        "engine/test_batcher.py::test_newcomers_prefill_one_chunk_at_a_time_between_the_rounds_of_others",
    ),
    Mistake(
        "who came later waited longer",
        "tandem.engine.batcher:Batcher._hand_out",
        "rows[0].since - waiting.since",
        "waiting.since - rows[0].since",
        "engine/test_batcher.py::test_of_two_rows_of_a_step_the_later_one_waited_less",
    ),
    Mistake(
        "what a sequence holds is believed one position too far",
        "tandem.engine.sequences:KVSequence.keep",
        "del self.held[length:]",
        "del self.held[length + 1 :]",
        "engine/test_sequences.py::test_keep_forgets_from_the_first_difference",
        ([1, 2, 3], [1, 9, 3], 1),
    ),
    Mistake(
        "each chunk is written where the prompt begins",
        "tandem.engine.sequences:KVSequence.fill",
        "PrefillRow(self.slot, start, ",
        "PrefillRow(self.slot, 0, ",
        "engine/test_sequences.py::test_fill_works_chunk_by_chunk_on_what_is_missing_only",
    ),
    Mistake(
        "a percentile is taken one place too high",
        "tandem.comparison.analysis.distributions:distribution",
        "np.percentile(known, PERCENTS)",
        "np.percentile(known, PERCENTS, method='higher')",
        "comparison/test_metrics.py::test_percentiles_interpolate_between_neighbours",
    ),
    Mistake(
        "what the link is set to stays in the round trips",
        "tandem.comparison.analysis.costs:_costs",
        " - link.round_trip(message_bytes)",
        "",
        "comparison/test_predictions.py::test_a_link_that_was_there_while_calibrating_is_taken_out",
    ),
    Mistake(
        "the server's own time counts as the network's",
        "tandem.rpc.wire:answer_from_wire",
        "seconds - reply.server_seconds",
        "seconds",
        "rpc/test_wire.py::test_of_a_round_what_the_server_did_not_take_is_the_networks",
    ),
    Mistake(
        "a server that says more than the round took makes time",
        "tandem.rpc.wire:answer_from_wire",
        "max(0.0, seconds - reply.server_seconds)",
        "seconds - reply.server_seconds",
        "rpc/test_wire.py::test_of_a_round_what_the_server_did_not_take_is_the_networks",
    ),
    Mistake(
        "a secret that a group can read is none of our business",
        "tandem.rpc.secret_files:warn_if_others_read",
        "stat.S_IRGRP | stat.S_IROTH",
        "stat.S_IROTH",
        "rpc/test_secret_files.py::test_a_group_that_may_read_is_warned_about",
    ),
    Mistake(
        "a file of the same size in the same place has not changed",
        "tandem.rpc.secret_files:signature",
        "(status.st_ino, status.st_size, status.st_mtime_ns)",
        "(status.st_ino, status.st_size)",
        "rpc/test_secret_files.py::test_a_rewrite_of_the_same_length_is_a_change",
    ),
    Mistake(
        "nothing keeps a plan from a core that is a byte too small",
        "tandem.planning.memory:Core.fits",
        "self.total <= self.usable",
        "self.total <= self.capacity",
        "planning/test_memory.py::test_a_core_is_full_at_what_is_usable_of_it",
    ),
    Mistake(
        "padding rows write where nothing is",
        "tandem.planning.memory:kv_bytes",
        "(load.batch + 1)",
        "load.batch",
        "planning/test_memory.py::test_the_cache_has_a_spare_row_and_room_behind_the_last_position",
    ),
    Mistake(
        "the room behind the last position is a token short",
        "tandem.planning.memory:kv_bytes",
        "load.drafts + 1",
        "load.drafts",
        "planning/test_memory.py::test_the_cache_has_a_spare_row_and_room_behind_the_last_position",
    ),
)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_a_planted_mistake_is_found_and_nothing_is_without_it(mistake: Mistake) -> None:
    check = mistake.check()
    check()
    with planted(mistake.name, mistake.where, mistake.old, mistake.new):
        found = failure_of(check)
    assert found is not None, f"nobody notices that {mistake.name}"
    assert not isinstance(found, PlaceGone | TypeError | NameError | SyntaxError), f"not caught, but broken: {found!r}"


def failure_of(check: Callable[[], object]) -> BaseException | None:
    try:
        check()
    except (Exception, pytest.fail.Exception) as error:
        return error
    return None


def test_every_mistake_is_another_one() -> None:
    assert len({mistake.name for mistake in MISTAKES}) == len(MISTAKES)
    assert len({(mistake.where, mistake.old, mistake.new) for mistake in MISTAKES}) == len(MISTAKES) >= 10


# --- the harness itself ---


def test_a_place_that_is_gone_is_no_catch() -> None:
    where = "tandem.engine.slots:SlotPool.release"
    code = function_at(where).__code__
    with pytest.raises(PlaceGone, match="stands 0 times"), planted("x", where, "no such text", ""):
        pass
    with pytest.raises(PlaceGone, match="there is no"):
        function_at("tandem.engine.slots:SlotPool.no_such_method")
    with planted("x", where, "self.memory.release(slot)", "pass"):
        assert function_at(where).__code__ is not code
    assert function_at(where).__code__ is code
    assert not issubclass(PlaceGone, AssertionError)


def test_a_mistake_that_nobody_notices_fails_its_test(tmp_path: Path) -> None:
    """Runs a copy of this file with a mistake that changes nothing and one whose place is gone."""
    text = Path(__file__).read_text(encoding="utf-8")
    begin, end = text.index("MISTAKES = ("), text.index('\n@pytest.mark.filterwarnings("ignore")')
    harmless = """MISTAKES = tuple(
    Mistake(name, "tandem.engine.slots:SlotPool.release", old, old,
            "engine/test_slots.py::test_the_lowest_free_slot_is_handed_out")
    for name, old in (("harmless", "self.memory.release(slot)"), ("gone", "no such text"))
)\n"""
    copy = tmp_path / "test_copy.py"
    copy.write_text(text[:begin] + harmless + text[end:], encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "planted_mistake_is_found"]
    done = subprocess.run(
        [*command, "--rootdir", str(REPOSITORY), "-c", str(REPOSITORY / "pyproject.toml"), str(copy)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=HANG,
    )
    assert "2 failed" in done.stdout, done.stdout + done.stderr
    assert "nobody notices that harmless" in done.stdout and "PlaceGone" in done.stdout
