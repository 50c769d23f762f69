"""Features over the wire: a toy head elsewhere is an oracle. With all of them in place it is always right."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tandem.engine.engine import OPENING_BYTES
from tandem.engine.model_config import ModelConfig
from tandem.runners.capabilities import Capabilities
from tandem.services.target_verifier import opening_features
from tandem.speculation.features import FeatureInbox, FeatureSpec
from tandem.speculation.types import InvalidField, Rule
from tandem.speculation.verification_mode import Pipeline
from tandem.v1 import target_verifier_pb2 as pb
from tests.daily import daily
from tests.support import (
    GREEDY,
    SAMPLED,
    ForgetfulRunner,
    answer,
    distributed,
    draft_config,
    ids,
    oracle,
    run,
    target_site,
    toy,
)
from tests.toy import ToyRunner

WAYS = (Pipeline.ON, Pipeline.NEVER_WAITING, Pipeline.AUTO)
PROMPT = b"a prompt of more tokens than a prefill step takes, and more than a head is told of"


def head_config(head: str = "head", kind: str = "eagle", slots: int = 4, k: int | None = 3, **wish: Any) -> ModelConfig:
    return draft_config(None, slots, 200, k, kind=kind, model=head, **wish)


def target(slots: int = 4, kind: Any = ToyRunner) -> ToyRunner:
    return toy(slots=slots, max_length=200, kind=kind)


@pytest.mark.each_value
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
async def test_a_head_elsewhere_that_gets_every_feature_is_always_right(sampling: Any) -> None:
    for context in (1, 256):
        config = head_config(feature_context=context)
        async with (
            target_site(target(), features=()) as site,
            distributed(site.address, config=config) as (generator, _),
        ):
            for prompt, k in ((PROMPT, 1), (PROMPT, 5), (b"ab", 3), (b"a", 3)):
                asked = ids(prompt, 60, sampling=sampling, speculation_length=k)
                got = await answer(generator.generate, asked)
                assert got.token_ids == oracle(prompt, sampling, 60)
                stats = got.completion.stats
                assert stats.accepted == stats.drafted > 0, (prompt, k)
                assert stats.rounds <= -(-60 // (k + 1)) + 1


async def test_without_features_lookup_drafts_alone_or_the_head_is_refused_by_name() -> None:
    async with target_site(target(kind=ForgetfulRunner)) as site:
        for kind in ("hybrid", "auto"):
            async with distributed(site.address, config=head_config(kind=kind)) as (generator, _):
                assert generator.info.draft_name == "ngram"
                got = await answer(generator.generate, ids(PROMPT, 60))
                assert got.token_ids == oracle(PROMPT, GREEDY, 60, memory=1)
                stats = got.completion.stats
                assert stats.accepted and not stats.feature_bytes and set(stats.drafted_by) == {"ngram"}
        for kind in ("eagle", "model"):
            with pytest.raises(ValueError, match="hands none out; start it with --hand_out_features"):
                async with distributed(site.address, config=head_config(kind=kind)):
                    pass
    async with target_site(target(), features=(1, 2)) as site:
        with pytest.raises(ValueError, match=r"reads layer 3, and the target at .* --hand_out_features 3,1,2"):
            async with distributed(site.address, config=head_config()):
                pass


async def test_rejection_waits_for_its_features_and_repeats() -> None:
    config = draft_config(None, 4, 200, kind="eagle", model="head,miss=0.4")
    async with target_site(target(), features=()) as site:
        said = set()
        for pipeline in (Pipeline.OFF, *WAYS):
            async with distributed(site.address, pipeline=pipeline, config=config) as (generator, _):
                asked = ids(PROMPT, 40, sampling=SAMPLED, rule=Rule.REJECTION, speculation_length=4)
                got = await answer(generator.generate, asked)
                assert got.completion.stats.accepted
                said.add(got.token_ids)
        assert len(said) == 1


def test_features_that_are_no_whole_positions_end_the_request_by_name() -> None:
    inbox = FeatureInbox(FeatureSpec((1, 2, 3), 8))
    with pytest.raises(InvalidField, match="37 bytes are not positions of 48"):
        inbox.opened(0, bytes(37))
    assert inbox.wanted(1000) == 1000 - 1 - inbox._context


def positions_of(spec: FeatureSpec, start: int, end: int) -> bytes:
    return b"".join(bytes([at % 64] * spec.position_bytes) for at in range(start, end))


@pytest.mark.parametrize("context", [1, 1000])
def test_what_waits_for_a_head_that_rests_is_bounded_and_begins_anew_where_it_was_cut(context: int) -> None:
    spec, most = FeatureSpec((1, 2), 4), max(256, context)
    inbox = FeatureInbox(spec, context)
    inbox.opened(0, positions_of(spec, 0, 10))
    inbox.look()  # a step was planned with these, and comes late
    for at in range(10, 5000, 3):
        inbox.came(at, positions_of(spec, at, at + 3))
        waits = sum(len(data) for _, data in inbox._waiting)
        assert waits <= most * spec.position_bytes
    assert inbox.end == 5002 and inbox.end - inbox.first > most - 3 and inbox.epoch > 0
    assert inbox.seen == (0, 10) and [(at, len(values)) for at, values in inbox.take()] == [(0, 10)]
    assert inbox.look() == 5002 and inbox.seen == (inbox.first, 5002)
    taken = inbox.take()
    assert [at for at, _ in taken] == list(range(inbox.first, 5002, 3)) and inbox.take() == []
    assert all((values == spec.decode(positions_of(spec, at, at + 3))).all() for at, values in taken)
    inbox.came(5002, positions_of(spec, 5002, 5003))  # goes on as after a gap
    assert (inbox.look(), len(inbox.take())) == (5003, 1)


@pytest.mark.parametrize("start", daily([0, 37, 99, 5000], 1, 3))
def test_an_opening_brings_the_last_features_that_fit_into_two_mebibytes(start: int) -> None:
    """gRPC refuses messages of 4 MiB, so that a long prompt of a large model could not be opened at all."""
    spec = FeatureSpec((1, 2, 3), 8192)
    most = OPENING_BYTES // spec.position_bytes
    asked: list[tuple[int, int]] = []

    class Sequence:
        async def features(self, spec: FeatureSpec, first: int, end: int) -> bytes:
            asked.append((first, end))
            return bytes((end - first) * spec.position_bytes)

    request = pb.OpenSessionRequest(prefix=[1] * 101, features=pb.FeatureRequest(start=start))
    found = run(opening_features(Sequence(), spec, request))  # type: ignore[arg-type]
    assert found.start == asked[0][0] == min(max(start, 100 - most), 100) and asked[0][1] == 100
    assert 40 < most < 60 and len(found.values) <= OPENING_BYTES == 2 * 2**20
    assert pb.OpenSessionResponse(features=found).ByteSize() < 3 * 2**20


def test_bfloat16_loses_what_it_says() -> None:
    values = np.random.default_rng(0).normal(size=(50, 2, 64)).astype(np.float32)
    values[3, 1, 5], values[4] = np.nan, 0
    sound = np.nan_to_num(values).reshape(50, -1)
    spec = FeatureSpec((1, 4), 64)
    data = spec.encode(values)
    assert len(data) == 50 * spec.position_bytes
    off = np.abs(spec.decode(data) - sound)
    assert (off <= 1.001 * 2**-8 * np.abs(sound)).all() and off.max() > 0
    assert spec.encode(spec.decode(data).reshape(50, 2, 64)) == data  # what was rounded stays


class FixedSteps(ToyRunner):
    """A target whose steps were made before anybody asked for features."""

    def hand_out(self, layers: Any) -> Any:
        raise ValueError("graphs were made without them")


async def test_a_target_that_cannot_hand_out_says_so_by_name() -> None:
    async def refusal(runner: Any, layers: tuple[int, ...] = ()) -> str:
        with pytest.raises(ValueError) as refused:
            async with target_site(runner, features=layers):
                pass
        return str(refused.value)

    assert "use --compile native or off: graphs were made" in await refusal(target(kind=FixedSteps))
    assert "layers 1, 9 are not all within 1 to 3" in await refusal(target(), (1, 9))
    assert "toy hands out no hidden states: its steps cannot" in await refusal(Bare(target()))


class Bare:
    """A runner without anything but the protocol's."""

    def __init__(self, runner: ToyRunner) -> None:
        self.limits, self.identity, self.shapes = runner.limits, runner.identity, runner.shapes
        self.capabilities = Capabilities()
