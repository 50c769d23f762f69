"""What keeps pages from elsewhere exact, whole, bounded and apart, taken away piece by piece: a test must notice."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.reliability.mutants import planted
from tests.services import test_prefill, test_prefill_faults, test_prefill_schedules, test_prefill_trust
from tests.services.test_session_mutants import Caught, caught
from tests.support import GREEDY

ELSEWHERE, TRANSFERS = "tandem.engine.remote_prefill:RemotePrefill", "tandem.engine.transfers:Transfers"
COPIES, PAGES = "tandem.engine.page_copies:PageCopies", "tandem.engine.prefill_pages:PrefillPages"
ENDPOINT, SERVICE = (
    "tandem.clients.prefill_client:PrefillEndpoint",
    "tandem.services.prefill_worker:PrefillWorkerService",
)
WIRE = "tandem.clients.page_wire:run_from_wire"
COMPUTED = partial(test_prefill.test_a_long_prompt_is_computed_elsewhere_and_only_its_end_here, GREEDY, "off")
KNOWN = partial(test_prefill.test_what_is_known_here_is_neither_asked_for_nor_sent, GREEDY)
SHARED = partial(test_prefill.test_prompts_that_come_at_once_share_a_transfer_and_the_first_may_be_cancelled, GREEDY)
FULL = test_prefill_faults.test_a_worker_that_is_full_refuses_at_once_and_another_is_asked
OTHER_MODEL = test_prefill_faults.test_a_worker_of_another_model_is_refused_before_it_computes_anything


def fault(which: int) -> Callable[[], None]:
    """The test of one of the faults, greedy."""
    test: Any = test_prefill_faults.test_whatever_goes_wrong_there_the_rest_is_processed_here
    return partial(test, *test_prefill_faults.FAULTS[which], GREEDY)


def by_token(test: Callable[..., None]) -> Callable[[], None]:
    return lambda: test(Path(tempfile.mkdtemp(prefix="tandem-test-")))


MUTANTS = (
    caught(
        "the first that waits ends the transfer of all",
        f"{TRANSFERS}.pages",
        "if not transfer.users:",
        "if True:",
        SHARED,
    ),
    caught(
        "a transfer goes on when nobody waits for it",
        f"{TRANSFERS}._end",
        "transfer.task.cancel()",
        "pass",
        test_prefill.test_a_transfer_that_nobody_waits_for_any_more_is_cancelled_there_too,
    ),
    caught("every prompt has a transfer of its own", f"{TRANSFERS}.runs", "found is not None and", "False and", SHARED),
    caught(
        "a transfer that begins too late is waited for",
        f"{TRANSFERS}.runs",
        "found.first <= wanted.first",
        "True",
        partial(test_prefill.test_who_holds_less_than_the_first_asks_itself, GREEDY),
    ),
    caught(
        "schedules see pages in another place",
        f"{COPIES}.into",
        "row.run.first + at",
        "max(0, row.run.first + at - 1)",
        test_prefill_schedules.schedules,
    ),
    caught(
        "a slot is freed twice",
        f"{PAGES}._sequence",
        "sequence.close()",
        "(sequence.close(), self._engine.slots.release(sequence.slot))",
        COMPUTED,
    ),
    caught(
        "pages are put where the prompt begins",
        f"{COPIES}.into",
        "row.run.first + at",
        "0",
        COMPUTED,
    ),
    caught(
        "all pages of a run are the first one",
        f"{COPIES}.out",
        "self._read(row)",
        "self._read(row)[:1] * row.count",
        partial(test_prefill.test_a_prompt_whose_pages_are_known_there_comes_in_runs_of_many, GREEDY),
    ),
    caught(
        "a page of the worker is sent before it is whole",
        f"{PAGES}._runs",
        "whole = len(sequence.held) // PAGE",
        "whole = len(tokens) // PAGE",
        COMPUTED,
    ),
    caught("what is known is asked for again", f"{ELSEWHERE}._copy_cached", "if prefixes is None:", "if True:", KNOWN),
    caught(
        "pages that a sequence holds are written again",
        f"{ELSEWHERE}._put",
        "run = PageRun(known, run.pages[known - run.first :], run.source)",
        "run = PageRun(known, run.pages, run.source)",
        partial(test_prefill.test_who_holds_more_than_the_first_takes_only_the_rest_of_its_transfer, GREEDY),
    ),
    caught(
        "a failure elsewhere fails the request",
        f"{ELSEWHERE}.fill",
        "except PrefillFailed as error:",
        "except ZeroDivisionError as error:",
        fault(0),
    ),
    caught("checksums are not compared", WIRE, "if zlib.crc32(page) != checksum:", "if False:", fault(0)),
    caught("pages may come in any order", WIRE, "if message.first_page != first:", "if False:", fault(1)),
    caught("more may come than was asked for", WIRE, "if not 1 <= count <= most:", "if count < 1:", fault(3)),
    caught("a target believes any header", f"{ENDPOINT}._same", "if difference:", "if False:", fault(4)),
    caught("a cut stream is a short answer", f"{ENDPOINT}._received", "or at < end:", "or False:", fault(7)),
    caught(
        "a silent worker is waited for",
        f"{ENDPOINT}._next",
        "timeout=max(0.0, min(left, self._seconds))",
        "timeout=None",
        fault(10),
    ),
    caught(
        "a worker that trickles is waited for",
        f"{ENDPOINT}._next",
        "pace.left(self.clock()) if pace else math.inf",
        "math.inf",
        test_prefill_faults.test_a_worker_that_trickles_is_given_up_where_the_rest_is_done_sooner_here,
    ),
    caught(
        "a worker that is gone is asked every time",
        f"{ENDPOINT}.failed",
        "if error.reason not in _HEALTHY:",
        "if False:",
        test_prefill_faults.test_a_worker_that_is_not_there_rests_and_is_found_once_it_is,
    ),
    caught("a worker computes for any model", f"{SERVICE}._check", "if difference:", "if False:", OTHER_MODEL),
    caught(
        "any number of prompts may wait",
        f"{SERVICE}.Prefill",
        "if self._lifecycle.running >",
        "if self._lifecycle.running > 99 +",
        FULL,
    ),
    caught(
        "an adapter's revision is not compared",
        f"{SERVICE}._check",
        "if request.adapter_revision != revision:",
        "if False:",
        test_prefill.test_adapters_have_pages_of_their_own_and_one_that_differs_there_is_processed_here,
    ),
    caught(
        "adapters share their pages",
        f"{ELSEWHERE}._fetch_pages",
        "self._engine.adapters.named(sequence.adapter)",
        '("", "")',
        test_prefill.test_adapters_have_pages_of_their_own_and_one_that_differs_there_is_processed_here,
    ),
    caught(
        "a scope is not sent on",
        "tandem.rpc.request_context:outgoing",
        "((PREFIX_SCOPE, _SCOPE.get()),) if _SCOPE.get() else ()",
        "()",
        by_token(test_prefill.test_a_prefix_stays_in_the_scope_of_its_caller_there_and_here),
    ),
    caught(
        "callers of all identities share a transfer",
        f"{ELSEWHERE}._fetch_pages",
        "Wanted(sequence.scope,",
        "Wanted(None,",
        by_token(test_prefill.test_callers_of_other_identities_do_not_share_a_transfer),
    ),
    caught(
        "no page is compared",
        f"{COPIES}.agree",
        "self._read(PageRow(row.slot, row.run.first, 1)) == row.run.pages",
        "True",
        test_prefill_trust.test_a_worker_whose_pages_are_wrong_is_found_at_its_first_prompt_and_nothing_of_it_is_used,
    ),
    caught(
        "the page that is compared is always the first",
        f"{ELSEWHERE}._fetch_pages",
        "if put.pages and self.chance(came) < len(put.pages):",
        "if put.pages and not picked:",
        test_prefill_trust.test_every_page_may_be_the_one_that_is_compared,
    ),
    caught(
        "what a wrong worker sent before is kept",
        f"{ELSEWHERE}._compare",
        "self._forget()",
        "pass",
        test_prefill_trust.test_pages_of_a_worker_that_is_found_wrong_later_are_forgotten_and_so_is_what_follows_from_them,
    ),
    caught(
        "who copied forgotten pages leaves them again",
        "tandem.engine.prefix_cache:PrefixCache.forget",
        "self._epoch += 1",
        "pass",
        test_prefill_trust.test_pages_of_a_worker_that_is_found_wrong_later_are_forgotten_and_so_is_what_follows_from_them,
    ),
    caught(
        "a process that stands where another stood is that one",
        f"{ELSEWHERE}._met",
        "if self._sources:",
        "if False:",
        test_prefill_trust.test_pages_of_a_worker_that_another_process_has_replaced_are_forgotten,
    ),
    caught(
        "a message has no more pages than are copied at once",
        f"{COPIES}.into",
        "range(0, len(row.run.pages), self.together)",
        "range(0, 1)",
        test_prefill_trust.test_more_pages_in_a_message_than_are_copied_at_once_cost_no_process,
    ),
    caught(
        "what made a row fail is asked for again",
        "tandem.engine.sequences:KVSequence.fill",
        "None if self._invalid else self.engine.remote_prefill",
        "self.engine.remote_prefill",
        test_prefill_faults.test_pages_that_make_a_row_fail_are_forgotten_and_processed_here,
    ),
)


@pytest.mark.thorough
@pytest.mark.parametrize("found", MUTANTS, ids=lambda mutant: mutant.mutant.name)
def test_it_is_noticed(found: Caught, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.support.PATIENCE_SECONDS", 0.5)
    monkeypatch.setattr("tests.support.RUN_SECONDS", 4.0)
    gc.collect()  # tasks of the mutant before: Python 3.11's parser fails if they are collected, and log, while it runs
    with planted(found.mutant), pytest.raises((Exception, pytest.fail.Exception)):
        found.by()
