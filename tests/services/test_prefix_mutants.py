"""What keeps prefixes exact, bounded and apart, taken away piece by piece: a test must notice each time."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.engine import test_prefix_cache, test_prefix_tree
from tests.reliability.mutants import planted
from tests.services import test_prefix_sharing
from tests.services.test_identity import ByToken
from tests.services.test_session_mutants import Caught, caught
from tests.support import GREEDY

TREE, CACHE = "tandem.engine.prefix_tree:PrefixTree", "tandem.engine.prefix_cache:PrefixCache"
SEQUENCE = "tandem.engine.sequences:KVSequence"
SCOPE = "tandem.rpc.request_context:set_prefix_scope"
LAST = test_prefix_tree.test_what_was_looked_up_last_is_taken_last_and_a_branch_from_its_end
WHOLE = test_prefix_tree.test_a_text_of_thousands_of_pages_is_forgotten_whole


def by_token(test: Callable[..., None], *arguments: object) -> Callable[[], None]:
    return lambda: test(ByToken(Path(tempfile.mkdtemp(prefix="tandem-test-"))), *arguments)


MUTANTS = (
    caught("parents count as used before their children", f"{TREE}._use", "reversed(path)", "path", LAST),
    caught("a text may take its own pages", f"{TREE}._page", "used > kept", "used", LAST),
    caught(
        "what is looked up does not count as used",
        f"{TREE}.match",
        "self._use(path)",
        "pass",
        LAST,
    ),
    caught("only the end of a text is forgotten", f"{TREE}.remove", "_below(path[0])", "_below(path[-1])", WHOLE),
    caught(
        "pages are filled from the slot's beginning",
        f"{CACHE}.insert",
        "self._store.save(slot, known, added)",
        "self._store.save(slot, 0, added)",
        partial(test_prefix_cache.test_an_answer_is_part_of_what_the_next_turn_begins_with, GREEDY),
    ),
    caught(
        "pages are found before they are filled",
        "tandem.engine.shared_steps:prefill",
        "row.prompt.tokens[: left.start + len(left.tokens)]",
        "row.prompt.tokens",
        test_prefix_cache.test_a_prefill_that_is_cancelled_leaves_what_it_processed_and_nothing_else,
    ),
    caught(
        "a failed row's pages are trusted",
        f"{SEQUENCE}.invalidate",
        "self._invalid = True",
        "self._invalid = False",
        test_prefix_cache.test_a_page_that_makes_a_row_fail_is_not_used_again,
    ),
    caught(
        "a failed step's slots are kept",
        f"{SEQUENCE}.release",
        "if batcher.failures == failures:",
        "if True:",
        test_prefix_cache.test_a_step_that_fails_leaves_nothing_of_its_slots,
    ),
    caught(
        "pages whose copy failed can be found",
        f"{CACHE}.insert",
        "self.tree.remove(scope, tokens)",
        "pass",
        partial(test_prefix_cache.test_pages_whose_copy_failed_are_not_found, GREEDY),
    ),
    caught(
        "prefixes are everybody's",
        SCOPE,
        'f"{identity}\\0{forwarded}"',
        '"nobody"',
        by_token(
            test_prefix_sharing.test_a_callers_prefixes_are_found_by_its_own_calls_alone_unless_all_share, "identity", 0
        ),
    ),
    caught(
        "a forwarded scope is the whole scope",
        SCOPE,
        'f"{identity}\\0{forwarded}"',
        "forwarded or identity",
        by_token(test_prefix_sharing.test_a_forwarded_scope_divides_a_callers_prefixes_and_opens_nobody_elses),
    ),
    caught(
        "the scope is not sent on",
        "tandem.rpc.request_context:outgoing",
        "((PREFIX_SCOPE, _SCOPE.get()),) if _SCOPE.get() else ()",
        "()",
        by_token(test_prefix_sharing.test_a_draft_workers_callers_share_neither_its_own_prefixes_nor_its_targets),
    ),
)


@pytest.mark.thorough
@pytest.mark.parametrize("found", MUTANTS, ids=lambda mutant: mutant.mutant.name)
def test_it_is_noticed(found: Caught, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.support.PATIENCE_SECONDS", 0.5)
    monkeypatch.setattr("tests.support.RUN_SECONDS", 3.0)
    with planted(found.mutant), pytest.raises((Exception, pytest.fail.Exception)):
        found.by()
