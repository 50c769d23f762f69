"""A head away from its target in C++: it drafts what it drafts beside it, and what module code drafts in its place."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.checkpoints.locate import Checkpoint
from tandem.runners.capabilities import FeaturesIn
from tandem.runners.eagle.eagle_runner import EagleRunner
from tandem.runners.eagle.hidden_states import TargetFeatures
from tandem.runners.eagle.load_head import load_head, load_remote_head
from tandem.runners.eagle.module import write_head
from tandem.runners.load_runner import BACKEND, Execution, Shape
from tandem.runners.native.head import NativeHead, NativeHeadRunner
from tandem.runners.native.native_runner import NativeRunner
from tandem.runners.protocol import TAIL, PrefillRow, Proposal, ProposeRow
from tandem.runners.startup import Startup
from tandem.runners.torch.platforms import platform_of
from tandem.speculation.features import FeatureInbox, FeatureSpec
from tests.rows import changed, fill
from tests.runners.modules import torch_features
from tests.runners.test_eagle import CONFIG, a_head
from tests.runners.test_native_head import TEXT, WAYS, a_target, check_same, drafted, row
from tests.runners.test_quantised_checkpoints import compressed

SPEC = FeatureSpec((1, 1, 2), 64)
pytestmark = pytest.mark.usefixtures("one_thread")


@dataclass(frozen=True)
class Heads:
    """A bfloat16 target, whose features cross a wire unchanged, and a float32 head: beside it, and twice away."""

    target: NativeRunner
    features: TargetFeatures
    beside: NativeHeadRunner
    native: NativeHeadRunner
    module: EagleRunner

    @property
    def away(self) -> tuple[NativeHeadRunner, EagleRunner]:
        return self.native, self.module

    def follow(self, slot: int, first: int, end: int) -> list[FeatureInbox]:
        """Gives the heads that are away inboxes with the features of these positions."""
        inboxes = [FeatureInbox(SPEC), FeatureInbox(SPEC)]
        for runner, inbox in zip(self.away, inboxes, strict=True):
            runner.follow(slot, inbox)
            inbox.opened(first, self.sent(slot, first, end))
            inbox.look()
        return inboxes

    def sent(self, slot: int, first: int, end: int) -> bytes:
        """The target's features of these positions, as the wire has them."""
        values: bytes = SPEC.encode(self.features.values[slot, first:end].float().numpy().reshape(end - first, 3, 64))
        return values

    def same(self, rows: Sequence[ProposeRow]) -> list[Proposal]:
        """What native steps draft, after a check that module code drafts the same."""
        got = drafted(self.native, rows)
        check_same(got, drafted(self.module, rows))
        assert [len(each.token_ids) for each in got] == [each.k for each in rows]
        return got


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """A head with an embedding of its own, in numbers that bfloat16 has too."""
    folder = tmp_path_factory.mktemp("head")
    write_head(folder, a_head(seed=3), embedding=torch.randn(258, 64).bfloat16())
    return BACKEND.find(str(folder))


def alone(head: Checkpoint, target: Path, compile: str = "auto", **flags: Any) -> Any:
    """The head as a draft role loads it."""
    execution = Execution("cpu", compile=compile, **flags)
    return load_remote_head(head, BACKEND.find(str(target)), execution, Shape(4, 96, 4, 16), Startup())


@pytest.fixture
def heads(target: Path, head: Checkpoint) -> Heads:
    own = a_target(target, torch.bfloat16)
    beside = load_head(head, own, Startup(), Execution(dtype="float32"))
    native, module = (alone(head, target, how, dtype="float32") for how in ("native", "off"))
    assert isinstance(beside, NativeHeadRunner) and isinstance(beside.model, NativeHead)
    assert isinstance(native, NativeHeadRunner) and isinstance(module, EagleRunner)
    ours, theirs = native.capabilities.features_in, module.capabilities.features_in
    assert isinstance(ours, FeaturesIn) and ours == replace(theirs, follow=ours.follow)  # type: ignore[type-var]
    return Heads(own, torch_features(beside.model.features), beside, native, module)


def test_with_all_features_it_drafts_what_it_drafts_beside_its_target_to_the_bit(heads: Heads) -> None:
    rows = []
    for slot, (tokens, tail) in enumerate(((TEXT[:1], 1), (TEXT[:2], 2), (TEXT, 2), (TEXT[::-1], TAIL))):
        fill(heads.target, slot, tokens[:-1])
        heads.follow(slot, 0, len(tokens) - 1)
        for runner in (heads.beside, *heads.away):
            fill(runner, slot, tokens[:-tail])
        rows.append(row(slot, tokens, tail))
    for changes in WAYS:
        asked = [changed(each, **changes, k=4 - n) for n, each in enumerate(rows)]
        together = heads.same(asked)
        assert together == drafted(heads.beside, asked)
        assert [drafted(heads.native, [each])[0] for each in asked] == together


@pytest.mark.parametrize("first", [1, 9, 21])
def test_it_sees_nothing_before_the_first_feature(heads: Heads, first: int) -> None:
    fill(heads.target, 0, TEXT[:-1])
    rows = []
    for slot, tokens in ((1, TEXT[::-1]), (0, TEXT)):
        fill(heads.target, slot, tokens[:-1])
        if slot == 1:  # what the slot held before counts for nothing
            for begin in (12, 0):
                heads.follow(0, begin, 24)
                for runner in heads.away:
                    fill(runner, 0, tokens[:-2])
        heads.follow(slot, first * (1 - slot), len(tokens) - 1)
        for runner in heads.away:
            begin = first + 1 if slot == 0 else 0
            runner.prefill([PrefillRow(slot, begin, tuple(tokens[begin:-2]))] if tokens[begin:-2] else [])
        rows.append(row(slot, tokens))
    for changes in WAYS:
        heads.same([changed(each, **changes) for each in rows])


def test_its_own_states_take_the_place_of_features_until_they_come(heads: Heads) -> None:
    """Two drafts go ahead of the verdicts; then one token of the first is accepted, and another follows it."""
    text, other = TEXT[:12], TEXT[::-1][:20]
    for slot, tokens in ((0, text), (2, other)):
        fill(heads.target, slot, tokens[:-1])
        fill(heads.beside, slot, tokens[:-1])
    inboxes = heads.follow(0, 0, len(text) - 1)
    heads.follow(2, 0, len(other) - 1)
    for runner in heads.away:
        fill(runner, 0, text[:-2])
        fill(runner, 2, other[:-2])
    for changes in WAYS:
        for inbox in inboxes:
            inbox.end = len(text) - 1
            inbox.look()
        guessed = list(text)
        for k in (1, 3, 2):
            asked = [row(2, other, k=0), row(0, guessed, k=k, **changes), row(2, other, **changes)]
            guessed += heads.same(asked)[1].token_ids
        before = guessed[: len(text) + 1]
        committed = [*before, 77]
        fill(heads.target, 0, before)
        for inbox in inboxes:
            inbox.came(len(text) - 1, heads.sent(0, len(text) - 1, len(text) + 1))
        late = heads.same([row(0, committed, tail=3, **changes)])  # no step was planned with these yet
        for inbox in inboxes:
            inbox.look()
        found = heads.same([row(0, committed, tail=3, **changes)])
        assert found == drafted(heads.beside, [row(0, committed, tail=3, **changes)])
        assert late != found or not changes


def test_after_a_failover_with_a_gap_it_drafts_as_from_the_features_that_came_since(heads: Heads) -> None:
    fill(heads.target, 0, TEXT[:-1])
    fill(heads.target, 1, TEXT[:-1])
    inboxes = heads.follow(0, 0, 9)
    for runner in heads.away:
        fill(runner, 0, TEXT[:10])
    for inbox in inboxes:
        inbox.came(9, heads.sent(0, 9, 10))
        inbox.opened(15, heads.sent(0, 15, 18))  # while a step goes on that was planned before
    heads.same([row(0, TEXT[:10])])
    for inbox in inboxes:
        inbox.came(18, heads.sent(0, 18, 24))
        assert inbox.epoch == 1 and inbox.look() == 24
    heads.follow(1, 15, 24)
    for runner in heads.away:
        for slot in (0, 1):
            runner.prefill([PrefillRow(slot, 16, tuple(TEXT[16:-2]))])
    for changes in WAYS:
        after, fresh = heads.same([row(slot, TEXT, **changes) for slot in (0, 1)])
        assert after == fresh


def test_tails_as_long_as_a_chunk_fit_in_a_step_of_all_slots(heads: Heads) -> None:
    rows = []
    for slot in range(4):
        tokens = TEXT[slot:]
        fill(heads.target, slot, tokens[:-1])
        heads.follow(slot, 0, len(tokens) - 1)
        for runner in heads.away:
            fill(runner, slot, tokens[:-16])
        rows.append(row(slot, tokens, tail=16))
    heads.same(rows)


def test_flags_choose_its_format_which_is_int8_by_default_for_a_target_that_runs_so(
    target: Path, head: Checkpoint, tmp_path: Path
) -> None:
    fast = "bfloat16" if platform_of("cpu").has_bfloat16() else "float32"
    for flags, dtype in (({}, fast), ({"weights": "int8"}, "int8/float32"), ({"weights": "q4"}, "q4/float32")):
        made = alone(head, target, **flags)
        assert (made.identity.backend, made.identity.dtype) == (
            "native",
            dtype,
        ) and made.capabilities.reprocess_accepted
    config = json.loads((target / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": compressed("int", "channel")}))
    (tmp_path / "model.safetensors").write_bytes((target / "model.safetensors").read_bytes())
    assert alone(head, tmp_path).identity.dtype == "int8/float32"
    assert alone(head, tmp_path, dtype="float32").identity.dtype == "float32"


def test_where_native_steps_are_not_available_module_code_runs_it(
    target: Path, head: Checkpoint, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_head(tmp_path, a_head(replace(CONFIG, head_dim=8)), embedding=torch.zeros(258, 64))
    with caplog.at_level("INFO", "tandem.engine"):
        odd = alone(BACKEND.find(str(tmp_path)), target)
    assert isinstance(odd, EagleRunner) and odd.identity.backend == "torch"
    assert "runs as module code: head_dim 8" in caplog.text
    assert isinstance(alone(head, target, "off"), EagleRunner)
