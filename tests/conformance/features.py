"""Cases of features: hidden states of the target that go with its verdicts, for a draft head elsewhere."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

from tandem.v1 import generation_pb2
from tandem.v1 import target_verifier_pb2 as pb
from tests.conformance.bench import Bench, LeftOut
from tests.conformance.sessions import GREEDY, Open
from tests.support import HANG
from tests.support import refusal as refused

BFLOAT16 = generation_pb2.FEATURE_FORMAT_BFLOAT16


@contextlib.asynccontextmanager
async def _session(bench: Bench) -> AsyncIterator[tuple[Bench, Open, list[int], int]]:
    """A session that is not open yet, the layers that its target hands out, and their bytes of a position."""
    if bench.featured is None:
        raise LeftOut("it needs a target that hands out features")
    bench = replace(bench, stub=bench.featured)
    info = (await bench.stub.GetModelInfo(pb.TargetVerifierGetModelInfoRequest(), timeout=HANG)).model
    prompt, layers = bench.prompt(), list(info.feature_layers)
    truth = await bench.expected(prompt, GREEDY, 20)
    async with bench.rounds() as rounds:
        session = Open(bench, rounds, bench.session_id(), prompt, truth)
        try:
            yield bench, session, layers, 2 * info.feature_size * len(layers)
        finally:
            await bench.stub.CloseSession(pb.CloseSessionRequest(session_id=session.session_id), timeout=HANG)


def _asked(layers: list[int], **rest: Any) -> pb.FeatureRequest:
    return pb.FeatureRequest(**({"layers": layers, "format": BFLOAT16} | rest))


async def features_are_the_same_again(bench: Bench) -> None:
    """A verdict has the features of the positions that it settled; replayed, resumed or rebuilt, the same bytes."""
    async with _session(bench) as (bench, session, layers, each):
        features = _asked(layers)
        opening = await bench.stub.OpenSession(session.opening(features=features), timeout=HANG)
        assert opening.HasField("features") and opening.features.start == 0
        known = opening.features.values
        assert len(known) == each * (len(session.prompt) - 1)
        first = await session.rounds.send(session.round(0, [*session.truth[:2], session.wrong(2)]))
        assert len(first.features) == each * len(first.token_ids) == each * 3
        again = await session.rounds.send(session.round(0))
        assert again.replayed and again.features == first.features
        known += first.features + (await session.rounds.send(session.round(3))).features
        prefix = [*session.prompt, *session.truth[:4]]
        resumed = await bench.stub.OpenSession(session.opening(prefix, features=features), timeout=HANG)
        assert resumed.features.values == known, "a resumed session's features are others"
        other = replace(session, session_id=bench.session_id())
        rebuilt = await bench.stub.OpenSession(other.opening(prefix, features=_asked(layers, start=5)), timeout=HANG)
        assert (rebuilt.features.start, rebuilt.features.values) == (5, known[5 * each :])
        await bench.stub.CloseSession(pb.CloseSessionRequest(session_id=other.session_id), timeout=HANG)


async def features_are_negotiated(bench: Bench) -> None:
    """Who does not ask for features gets none; a session keeps its choice of layers, and a bad one is named."""
    async with _session(bench) as (bench, session, layers, each):
        for bad, field in (
            (_asked([layers[0] + 1000]), "features.layers"),
            (_asked([]), "features.layers"),
            (_asked(layers * 9), "features.layers"),
            (_asked(layers, format=99), "features.format"),
        ):
            refusal = await refused(bench.stub.OpenSession(session.opening(features=bad), timeout=HANG))
            assert (refusal.code, refusal.field) == ("INVALID_ARGUMENT", field), refusal
        opening = await bench.stub.OpenSession(session.opening(), timeout=HANG)
        assert not opening.HasField("features")
        assert not (await session.rounds.send(session.round(0))).features
        refusal = await refused(bench.stub.OpenSession(session.opening(features=_asked(layers)), timeout=HANG))
        assert (refusal.code, refusal.reason) == ("ALREADY_EXISTS", "SESSION_CONFLICT"), refusal
        one = replace(session, session_id=bench.session_id())
        opening = await bench.stub.OpenSession(one.opening(features=_asked(layers[-1:])), timeout=HANG)
        assert len(opening.features.values) * len(layers) == each * (len(session.prompt) - 1)
        await bench.stub.CloseSession(pb.CloseSessionRequest(session_id=one.session_id), timeout=HANG)
