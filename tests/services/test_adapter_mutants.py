"""What keeps adapters apart and in place, taken away piece by piece: a test must notice each time."""

from __future__ import annotations

from functools import partial

import pytest

from tests.checkpoints.test_adapters import test_a_pattern_matches_the_end_of_a_path_from_a_dot_on
from tests.engine import test_adapters as engine
from tests.reliability.mutants import planted
from tests.runners.test_toy_adapters import test_an_adapter_that_was_dropped_cannot_be_named
from tests.services import test_adapter_metrics as metrics
from tests.services import test_adapters as wire
from tests.services.test_session_mutants import Caught, caught
from tests.support import GREEDY

SEQUENCE, ADAPTERS = "tandem.engine.sequences:KVSequence", "tandem.engine.adapter_registry:Adapters"
SERVICE, REMOTE = "tandem.services.target_verifier:TargetVerifierService", "tandem.rpc.remote_session:RemoteSession"
ALONE = partial(engine.test_a_kept_prefix_is_found_by_requests_of_the_same_adapter_alone, GREEDY)
WHOLE_NAMES = test_a_pattern_matches_the_end_of_a_path_from_a_dot_on
IN_USE = engine.test_an_adapter_in_use_stays_and_one_that_waits_for_a_slot_counts
REVISION = ({"adapter": "red", "adapter_revision": "toy:blue"}, "adapter_revision: this target's red is toy:red")

MUTANTS = (
    caught(
        "rank patterns match anywhere in a path",
        "tandem.checkpoints.module_patterns:ModulePatterns.of",
        'begins = 1 | places.after(".")',
        "begins = -1",
        WHOLE_NAMES,
    ),
    caught(
        "rank patterns match the beginning of what follows a dot",
        "tandem.checkpoints.module_patterns:ModulePatterns.of",
        "self._before(pattern, 1 << len(path), places)",
        "self._before(pattern, (2 << len(path)) - 1, places)",
        WHOLE_NAMES,
    ),
    *(
        caught(f"who leaves ends {what}", f"{ADAPTERS}._finished", "asyncio.shield(task)", "task", by)
        for what, by in (
            ("a removal", engine.test_a_removal_whose_caller_leaves_in_a_long_step_frees_the_memory_all_the_same),
            ("an addition", engine.test_an_addition_whose_caller_leaves_in_a_long_step_is_there_whole),
        )
    ),
    caught(
        "prefixes are every adapter's", f"{SEQUENCE}.__init__", "prefixes.scope(adapter)", "prefixes.scope(0)", ALONE
    ),
    caught(
        "what follows a kept prefix has no adapter",
        "tandem.engine.shared_steps:_rest",
        "replace(row, start=start,",
        "PrefillRow(row.slot, start,",
        ALONE,
    ),
    caught(
        "a number is used again",
        f"{ADAPTERS}.add",
        "self._last += 1",
        "self._last = 1",
        engine.test_an_adapter_that_comes_back_finds_no_prefix_of_the_one_before,
    ),
    caught(
        "an adapter is given back never",
        f"{SEQUENCE}.release",
        "self.engine.adapters.give_back(self.adapter)",
        "pass",
        IN_USE,
    ),
    caught(
        "who waits for a slot does not count", f"{ADAPTERS}.taken", "number = self.take(name)", "number = 0", IN_USE
    ),
    caught("what is used may go", f"{ADAPTERS}.remove", "if entry.users:", "if False:", IN_USE),
    caught(
        "fused rounds verify without the adapter",
        "tandem.engine.fused_rounds:FusedRounds._attempted",
        "self._target.adapter",
        "0",
        partial(engine.test_fused_rounds_draft_without_the_adapter_and_verify_with_it, GREEDY),
    ),
    caught(
        "a draft has no adapter of its own",
        f"{ADAPTERS}.take_own",
        'name if name in self._by_name else ""',
        '""',
        engine.test_a_draft_has_its_own_adapter_of_the_same_name_or_none_and_no_token_changes,
    ),
    caught(
        "a draft is filled with its adapter and proposes without",
        "tandem.engine.model_drafter:DraftSequence.row",
        "processor, self.adapter",
        "processor, 0",
        engine.test_a_draft_has_its_own_adapter_of_the_same_name_or_none_and_no_token_changes,
    ),
    caught(
        "a draft wants the target's adapter",
        f"{ADAPTERS}.take_own",
        'name if name in self._by_name else ""',
        "name",
        engine.test_a_draft_has_its_own_adapter_of_the_same_name_or_none_and_no_token_changes,
    ),
    caught(
        "an adapter that was removed may still be named by rows",
        "tandem.runners.toy:ToyRunner.drop_adapter",
        "del self.revisions[number]",
        "pass",
        test_an_adapter_that_was_dropped_cannot_be_named,
    ),
    caught(
        "what waits counts as running",
        f"{ADAPTERS}.taken",
        "entry.waiting += 1",
        "pass",
        metrics.test_adapters_in_use_run_or_wait_and_one_that_goes_takes_its_samples_along,
    ),
    caught(
        "two may add one name at once",
        f"{ADAPTERS}.add",
        "or choice.name in self.changing",
        "",
        engine.test_two_additions_of_one_name_at_once_give_one_adapter,
    ),
    caught(
        "a session opens again with any adapter",
        "tandem.services.sessions.table:Session.resume",
        "if getattr(request, name) != getattr(self.request, name):",
        'if name != "adapter" and getattr(request, name) != getattr(self.request, name):',
        partial(wire.test_sessions_have_adapters_for_life_and_say_their_revision, GREEDY),
    ),
    caught(
        "another revision will do",
        f"{SERVICE}._check_open",
        "request.adapter_revision != revision",
        "False",
        partial(wire.test_a_session_that_cannot_have_its_adapter_is_refused_before_any_prefill, *REVISION),
    ),
    caught(
        "a session that moves names no revision",
        f"{REMOTE}._opening",
        "self.client.tokenizer_sha256, self._adapter_revision",
        'self.client.tokenizer_sha256, ""',
        partial(wire.test_a_session_that_is_lost_goes_on_elsewhere_with_the_same_adapter_alone, GREEDY),
    ),
)


@pytest.mark.thorough
@pytest.mark.parametrize("found", MUTANTS, ids=lambda mutant: mutant.mutant.name)
def test_it_is_noticed(found: Caught, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.support.PATIENCE_SECONDS", 0.5)
    monkeypatch.setattr("tests.support.RUN_SECONDS", 3.0)
    with planted(found.mutant), pytest.raises((Exception, pytest.fail.Exception)):
        found.by()
