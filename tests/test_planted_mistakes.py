"""Plants plausible mistakes in functions, one at a time; the named test must fail with each and pass without it.

Mistakes in the algorithm are in tests/speculation, mistakes against the guarantees in tests/reliability.
"""

from __future__ import annotations

import importlib
import itertools
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
        Mistake(name, f"tandem.engine.{where}", old, new, f"engine/test_holds.py::{by}", arguments)
        for name, where, old, new, by, arguments in (
            (
                "others are held back although it is of no use",
                "slots:SlotPool._holder",
                "self.memory.cost(place.tokens) <= self.memory.limit",
                "0 <= self.memory.limit",
                "test_who_cannot_fit_holds_nobody_back_and_has_its_turn_once_it_can",
                (itertools.repeat("mallory"),),
            ),
            (
                "a hold follows the last one at once",
                "holds:Holds.begins",
                "max(self.until, self._rests_until)",
                "self.until",
                "test_who_asks_for_all_memory_for_ever_costs_the_others_a_quarter_at_most",
                (itertools.repeat("mallory"),),
            ),
            (
                "holds never grow, so that who waits starves",
                "holds:Holds.begins",
                "min(2 * self._length, LONGEST)",
                "FIRST",
                "test_nobody_starves_and_nobody_is_locked_out",
                (2,),
            ),
        )
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
                "batcher.between_steps(functools.partial(memory.give_back, slot, tokens))",
                "memory.give_back(slot, tokens)",
                "test_pages_go_back_only_after_the_step_that_may_still_write_them",
                (),
            ),
            (
                "who comes later passes who waits for memory",
                "slots:SlotPool.acquire",
                "and not self._held_back(place)",
                "",
                "test_a_long_sequence_has_its_turn_before_short_ones_that_came_later",
                (),
            ),
            (
                "who left for a moment loses the memory",
                "slots:SlotPool._too_late",
                "loop.time() + KEPT_SECONDS",
                "loop.time()",
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
                "sequences:KVSequence.admitted",
                "request.most_tokens(prompt_length)",
                "prompt_length",
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
        "tandem.engine.sequences:KVSequence.truncate_to",
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
        "tandem.comparison.measuring.distributions:distribution",
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
        "tandem.rpc.wire_verdicts:answer_from_wire",
        'seconds - check.seconds("server_seconds", reply.server_seconds, seconds)',
        "seconds",
        "rpc/test_wire.py::test_of_a_round_what_the_server_did_not_take_is_the_networks",
    ),
    Mistake(
        "a server that says more than the round took makes time",
        "tandem.rpc.wire_verdicts:answer_from_wire",
        "reply.server_seconds, seconds)",
        "reply.server_seconds)",
        "rpc/test_wire.py::test_of_a_round_what_the_server_did_not_take_is_the_networks",
    ),
    Mistake(
        "features behind a gap are used",
        "tandem.speculation.features:FeatureInbox.came",
        "not self.first <= start <= self.end",
        "not self.first <= start",
        "services/test_features.py::test_features_behind_a_gap_are_left_out_until_an_opening_begins_anew",
    ),
    Mistake(
        "an opening has all features of a long prompt",
        "tandem.services.sessions.session_features:opening_features",
        "max(request.features.start, end - OPENING_BYTES // spec.position_bytes)",
        "request.features.start",
        "services/test_features.py::test_an_opening_brings_the_last_features_that_fit_into_two_mebibytes",
        (0,),
    ),
    *(
        Mistake(name, f"tandem.rpc.{where}", old, new, f"rpc/test_contract.py::{by}", arguments)
        for name, where, old, new, by, arguments in (
            (
                "an id outside the vocabulary is a token",
                "wire_checks:token_ids",
                "max(values) >= vocab_size",
                "max(values) > vocab_size",
                "test_a_round_beyond_the_contract_is_refused_by_its_field",
                ({"token_ids": [7, 8, 258]}, "token_ids: the id at 2"),
            ),
            (
                "a time that is no number is a time",
                "wire_checks:seconds",
                "if not 0 <= value < math.inf:",
                "if value < 0 or value == math.inf:",
                "test_a_round_beyond_the_contract_is_refused_by_its_field",
                ({"compute_seconds": float("nan")}, "compute_seconds: "),
            ),
            (
                "a server may take longer than the wait for it",
                "wire_checks:seconds",
                "min(value, most)",
                "value",
                "test_no_time_of_a_server_is_longer_than_the_wait_for_it",
                (),
            ),
            (
                "more drafts are accepted than were sent",
                "wire_verdicts:answer_from_wire",
                "if reply.accepted > len(draft):",
                "if False:",
                "test_a_round_beyond_the_contract_is_refused_by_its_field",
                ({"accepted": 4}, "accepted: 4 of 3 drafts"),
            ),
            (
                "other tokens are accepted than were sent",
                "wire_verdicts:answer_from_wire",
                "if reply.accepted > same:",
                "if False:",
                "test_a_round_beyond_the_contract_is_refused_by_its_field",
                (
                    {"accepted": 3, "token_ids": [7, 8, 1, 2], "committed_length": 14},
                    "token_ids: the id at 2 is not the draft's",
                ),
            ),
            (
                "a run verifies any number of drafts",
                "wire_verdicts:run_step_from_wire",
                'check.count("drafted", reply.drafted, bounds.most_drafts)',
                "reply.drafted",
                "test_a_step_of_a_run_beyond_the_contract_is_refused_by_its_field",
                ({"drafted": 6}, "drafted: 6 is outside 0 to 5"),
            ),
            (
                "a round commits more than one token beside the accepted ones",
                "wire_verdicts:_verdict",
                "if count != reply.accepted + 1:",
                "if count < reply.accepted + 1:",
                "test_a_round_beyond_the_contract_is_refused_by_its_field",
                ({"token_ids": [7, 8, 9, 1], "committed_length": 14}, "token_ids: 4 with 2 accepted drafts"),
            ),
            (
                "a round ends wherever the server says",
                "wire_verdicts:_verdict",
                "if reply.committed_length != base_length + count:",
                "if reply.committed_length < base_length + count:",
                "test_a_round_beyond_the_contract_is_refused_by_its_field",
                ({"committed_length": 2**32 - 1}, "committed_length: "),
            ),
        )
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
        "tandem.workshops.planning.memory:Core.fits",
        "self.total <= self.usable",
        "self.total <= self.capacity",
        "planning/test_memory.py::test_a_core_is_full_at_what_is_usable_of_it",
    ),
    Mistake(
        "padding rows write where nothing is",
        "tandem.workshops.planning.memory:kv_bytes",
        "(load.batch + 1) * (load.length + max(load.chunk, load.drafts + 1))",
        "load.batch * (load.length + max(load.chunk, load.drafts + 1))",
        "planning/test_memory.py::test_the_cache_has_a_spare_row_and_room_behind_the_last_position",
    ),
    Mistake(
        "the room behind the last position is a token short",
        "tandem.workshops.planning.memory:kv_bytes",
        "max(load.chunk, load.drafts + 1)",
        "max(load.chunk, load.drafts)",
        "planning/test_memory.py::test_the_cache_has_a_spare_row_and_room_behind_the_last_position",
    ),
)


@pytest.mark.thorough
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


@pytest.mark.thorough
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
