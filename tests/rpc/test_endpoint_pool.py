"""RetryBudget, EndpointPool and `disagreement`: pure, with a clock and a random source of our own."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from tandem.cli.option import with_default_ports
from tandem.rpc.endpoint_pool import EndpointPool, bare_host, disagreement, joined, parse_addresses
from tandem.speculation.retry import RetryBudget
from tandem.speculation.types import ModelInfo

INFO = ModelInfo("m", "rev", "tok", 258, 160, 5, 4, "float32", "cpu", "torch")


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def retry_budget(
    clock: Clock, seconds: float = 60.0, deadline: float | None = None, chance: float = 1.0
) -> RetryBudget:
    return RetryBudget(seconds, deadline, clock, lambda: chance)


def waits(of: RetryBudget, clock: Clock) -> list[float]:
    """Every wait until it gives up, each of them spent."""
    found = []
    while (wait := of.wait()) is not None:
        clock.now += wait
        found.append(round(wait, 6))
    return found


def test_the_first_attempt_is_at_once_and_waits_double_up_to_the_longest() -> None:
    clock = Clock()
    found = waits(retry_budget(clock), clock)
    assert found[:9] == [0.0, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0]
    assert 58 <= sum(found) < 60


@pytest.mark.parametrize(("seconds", "attempts"), [(60.0, 12), (10.0, 10), (1.0, 5), (0.3, 3), (0.0, 0)])
def test_attempts_that_take_long_are_not_fewer(seconds: float, attempts: int) -> None:
    clock = Clock()
    of = retry_budget(clock, seconds)
    while (wait := of.wait()) is not None:
        clock.now += wait + 9.0
    assert of.attempts == attempts
    quick = retry_budget(clock, seconds)
    assert min(12, len(waits(quick, clock))) == attempts


def test_it_gives_up_before_the_requests_own_deadline() -> None:
    clock = Clock()
    of = retry_budget(clock, deadline=103.0)
    assert of.limited(30.0) == pytest.approx(3.0)
    waits(of, clock)
    assert 101.5 < clock.now < 102.9
    assert not of.over
    clock.now = 104.0
    assert of.limited(30.0) == 0.001 and of.over


def test_a_roster_says_each_change_once_with_the_attempts(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    pool = EndpointPool(("a:1", "b:2"), clock)
    with caplog.at_level(logging.INFO):
        for address in ("a:1", "b:2", "a:1", "b:2", "a:1"):
            assert pool.current == address
            clock.now += 1.0
            pool.failed(address, "gone\naway")
        pool.answered("b:2")
        pool.answered("b:2")
    assert [record.getMessage() for record in caplog.records] == [
        "server at a:1 failed (gone away): trying b:2",
        "server at b:2 failed (gone away): trying a:1",
        "server at b:2 answers, after 5 attempts and 4.0 s",
    ]


def test_a_verifier_that_runs_something_else_is_passed_over(caplog: pytest.LogCaptureFixture) -> None:
    pool = EndpointPool(("a:1", "b:2", "c:3"), Clock())
    pool.failed("a:1", "gone")
    assert pool.refuse("b:2", "its dtype is 'bfloat16'")
    assert pool.current == "c:3"
    assert pool.after("c:3") == "a:1" and pool.after("a:1") == "c:3"
    assert pool.refuse("c:3", "its weights")
    assert not pool.refuse("a:1", "its weights")
    assert not pool.refused  # whoever comes later may find them mended
    assert "server at b:2 is not used: its dtype is 'bfloat16'" in caplog.text


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model_name", "n"),
        ("weights_revision", "other"),
        ("tokenizer_sha256", "other"),
        ("vocab_size", 259),
        ("dtype", "bfloat16"),
        ("device", "cuda"),
        ("backend", "nxdi"),
        ("max_sequence_length", 128),
        ("max_speculation_length", 4),
    ],
)
def test_what_would_change_tokens_or_refuse_rounds_is_named(field: str, value: object) -> None:
    found = disagreement(INFO, replace(INFO, **{field: value}))
    assert found is not None and field in found and str(value) in found
    more = replace(INFO, max_sequence_length=512, max_speculation_length=8, kv_slots=1, startup_seconds=9.0)
    assert disagreement(INFO, more) is None, "more room, and other slots"


@pytest.mark.parametrize("given", ["", "a", "a:", ":1", "a:0", "a:70000", "a:1,,b:2", "a:1,a:1"])
def test_bad_addresses_are_refused_by_name(given: str) -> None:
    with pytest.raises(ValueError, match="target_host: "):
        parse_addresses(given)


def test_verifiers_that_are_full_are_asked_for_so_long_and_no_longer() -> None:
    clock = Clock()
    of = RetryBudget(60.0, None, clock, lambda: 1.0, admission=10.0)
    clock.now += 1000.0
    of.opening()  # seconds count from here
    waited = 0
    while (wait := of.full(0.5)) is not None and waited < 100:
        clock.now += wait
        waited += 1
    assert waited == 20


def test_whoever_is_asked_or_refused_is_not_asked_besides() -> None:
    pool = EndpointPool(("a:1", "b:2", "c:3"), Clock())
    assert pool.following("b:2") == "b:2"
    assert pool.following("b:2", ["b:2"]) == "c:3"
    assert pool.following("b:2", ["b:2", "c:3"]) == "a:1"
    assert pool.following("b:2", ["a:1", "b:2", "c:3"]) is None
    pool.refuse("c:3", "its dtype")
    assert pool.following("b:2", ["b:2"]) == "a:1"


LOOPBACKS = ("::1", "[::1]", "0:0:0:0:0:0:0:1", "[0:0:0:0:0:0:0:1]", "0000::0001")


@pytest.mark.parametrize(
    ("given", "bare"),
    [
        *((spelling, "::1") for spelling in LOOPBACKS),
        *(("::", "::"), ("[::]", "::"), ("FE80::1%eth0", "fe80::1%eth0"), ("[fe80::1%2]", "fe80::1%2")),
        *((same, same) for same in ("127.0.0.1", "localhost", "a.example")),
    ],
)
def test_a_host_has_one_form_with_and_without_a_port(given: str, bare: str) -> None:
    address = f"[{bare}]:7" if ":" in bare else f"{bare}:7"
    assert (bare_host(given), joined(given, 7)) == (bare, address)
    assert with_default_ports(given, 7) == with_default_ports(address, 8) == address
    assert parse_addresses(address.replace("::1]", "0::0:1]")) == (address,)


@pytest.mark.parametrize("given", ["[::1", "::1]", "[localhost]", "::1:50051", ":::", "1.2.3.4:5", "[1.2.3.4]", "::1%"])
def test_what_is_no_host_is_refused_by_name(given: str) -> None:
    with pytest.raises(ValueError, match=r"^http_host: '.*' is not a name, IPv4, or IPv6.* as \[::1\]:50051$"):
        bare_host(given, "http_host")


@pytest.mark.parametrize("given", ["::1:50051", "::1:8080"])
def test_a_port_behind_a_bare_address_is_refused_and_its_spelling_is_said(given: str) -> None:
    port = given.rpartition(":")[2]
    with pytest.raises(ValueError, match=rf"^target: '{given}' may be .*; with a port it is \[::1\]:{port}$"):
        parse_addresses(given, "target")
    with pytest.raises(ValueError, match=rf"^target_host: '{given}' may be .*\[{given}\], or .* \[::1\]:{port}$"):
        with_default_ports(given, 7)
