"""Random messages, bytes and frames: every message is answered from the declared set, and a canary all along."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import hypothesis
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.internal.conjecture import providers

from tests.reliability import frames, fuzzed, messages
from tests.reliability.fuzzed import Method, Servers, fuzzed_servers, methods

DECLARED = {
    "OK",
    "INVALID_ARGUMENT",
    "OUT_OF_RANGE",
    "NOT_FOUND",
    "ALREADY_EXISTS",
    "FAILED_PRECONDITION",
    "RESOURCE_EXHAUSTED",
    "ABORTED",
}
METHODS = methods()
EVERY = 50
"""Messages between two canaries."""


def some(daily: int, more: int) -> Any:
    """How many are sent with `make test`, and how many with `make thorough`."""
    return pytest.mark.parametrize("count", [daily, pytest.param(more, marks=pytest.mark.thorough)])


@pytest.fixture(scope="module")
def servers() -> Iterator[Servers]:
    with fuzzed_servers() as running:
        yield running


def _examples(count: int) -> Any:
    phases, checks = [Phase.generate, Phase.shrink], list(HealthCheck)
    chosen = settings(max_examples=count, deadline=None, database=None, phases=phases, suppress_health_check=checks)
    # Hypothesis draws numbers that stand in the modules loaded so far: the mix would depend on the tests before.
    return lambda test: patch.object(providers, "_get_local_constants", providers.Constants)(
        chosen(hypothesis.seed(7)(test))
    )


def fuzz(strategy: Callable[[Method], st.SearchStrategy[Any]], count: int, servers: Servers, allowed: set[str]) -> int:
    """Sends `count` messages to random methods. A failing one is shrunk, and printed with its method."""
    sent = [0]

    @_examples(count)
    @given(st.sampled_from(METHODS).flatmap(lambda method: st.tuples(st.just(method), strategy(method))))
    def one(pair: tuple[Method, Any]) -> None:
        method, message = pair
        status = servers.ask(method, message)
        assert status in allowed, f"{method.path} answers {status} to {message!r}"
        sent[0] += 1
        if sent[0] % EVERY == 0:
            servers.canary()

    with patch("tandem.services.verify_runs.OPENING_COMES", 0.05):  # many announce openings that never come
        one()
    servers.canary()
    return sent[0]


def fuzz_frames(count: int, servers: Servers, seed: int = 7) -> int:
    chance = random.Random(seed)
    for i in range(count):
        method = chance.choice(METHODS)
        request = method.request(
            **({"session_id": "s1"} if "session_id" in method.request.DESCRIPTOR.fields_by_name else {})
        )
        data = frames.conversation(chance, method.path, request.SerializeToString())
        frames.send(servers.sites[method.service].address, data)
        if i % EVERY == 0:
            servers.canary()
    servers.canary()
    return count


def fuzz_runs(count: int, servers: Servers) -> int:
    """Runs of up to six messages each. Refusals have a declared status and name a field of the message."""
    refused = {"INVALID_ARGUMENT", "OUT_OF_RANGE"}
    done = [0]

    @_examples(count)
    @given(st.lists(fuzzed.run_messages(), max_size=6), st.integers(0, 12), st.booleans())
    def one(sent: list[dict[str, Any]], begin: int, early: bool) -> None:
        found = fuzzed.fuzzed_run(servers, sent, begin, early)
        assert found.status in {"OK", *refused}, found
        assert found.status == "OK" or any(name in found.says for name in fuzzed.FIELDS), found
        done[0] += 1
        if done[0] % EVERY == 0:
            servers.canary()

    one()
    servers.canary()
    return done[0]


@some(100, 200)
def test_runs_answer_any_message_with_the_targets_tokens_or_the_name_of_a_field(servers: Servers, count: int) -> None:
    servers.answered.clear()
    assert fuzz_runs(count, servers) >= count
    assert min(servers.answered["OK"], servers.answered["INVALID_ARGUMENT"]) > count // 5, servers.answered
    assert servers.answered["OUT_OF_RANGE"] > 2
    servers.nothing_is_held()


@some(120, 400)
def test_well_formed_messages_get_a_declared_answer(servers: Servers, count: int) -> None:
    servers.answered.clear()
    assert fuzz(lambda method: messages.requests(method.request), count, servers, DECLARED) >= count
    assert servers.answered["OK"] > count // 12 and servers.answered["INVALID_ARGUMENT"] > count // 14
    servers.nothing_is_held()


@some(50, 200)
def test_bytes_that_are_no_message_get_an_answer(servers: Servers, count: int) -> None:
    assert fuzz(lambda method: messages.broken(method.request), count, servers, DECLARED) >= count
    servers.nothing_is_held()


@some(30, 60)
def test_noise_on_a_connection_disturbs_nobody(servers: Servers, count: int) -> None:
    assert fuzz_frames(count, servers) == count
    servers.nothing_is_held()


def test_a_method_whose_name_is_no_utf8_disturbs_nobody(servers: Servers) -> None:
    asked = frames.frame(frames.HEADERS, frames.END_HEADERS | frames.END_STREAM, 1, frames.headers("/x\udcb6"))
    data = frames.PREFACE + frames.frame(frames.SETTINGS, 0, 0, b"") + asked
    for _ in range(20):
        for site in servers.sites.values():
            frames.send(site.address, data)
    servers.canary()
    servers.nothing_is_held()


@pytest.mark.campaign
@pytest.mark.timeout(300)
def test_thousands_of_messages_get_a_declared_answer(servers: Servers) -> None:
    servers.answered.clear()
    fuzz(lambda method: messages.requests(method.request), 4000, servers, DECLARED)
    fuzz(lambda method: messages.broken(method.request), 2000, servers, DECLARED)
    fuzz_runs(1000, servers)
    fuzz_frames(600, servers)
    servers.nothing_is_held()
