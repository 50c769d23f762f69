"""The validator itself: a good history passes, and each planted violation is found under its rule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.reliability.history import Event
from tests.reliability.validator import RULES, Validator

PROMPT = [65, 1, 2]
TRUTH = [*PROMPT, *range(10, 40)]


def truth(client: int, count: int) -> list[int]:
    return TRUTH[: 3 + count]


def reply(tokens: list[int], base: int, **rest: Any) -> dict[str, Any]:
    said = {"stale": False, "replayed": False, "committed_length": base + len(tokens), "token_ids": tokens}
    return said | {"accepted": max(0, len(tokens) - 1), "server_seconds": 0.1} | rest


def call(number: int, method: str, asked: dict[str, Any], said: dict[str, Any], kind: str = "reply") -> list[Event]:
    about = {"server": "a", "call": number, "client": 65, "method": method, "session": "s"}
    return [Event("request", message=asked, **about), Event(kind, message=said, **about)]


def verify(number: int, base: int, draft: list[int], said: dict[str, Any], kind: str = "reply") -> list[Event]:
    return call(
        number, "Verify", {"base_length": base, "last_token": TRUTH[base - 1], "draft_tokens": draft}, said, kind
    )


def outcome(tokens: list[int], **rest: Any) -> Event:
    return Event("outcome", client=65, message={"tokens": tokens, "expected": TRUTH[3:7], **rest})


def good() -> list[Event]:
    """Opens, two rounds, a repetition, a stale one, an expired lease, a resume, the end."""
    return [
        *call(1, "OpenSession", {"prefix": PROMPT}, {"committed_length": 3}),
        *verify(2, 3, [10, 99], reply([10, 11], 3)),
        *verify(3, 3, [98], reply([10, 11], 3, replayed=True, server_seconds=0.7)),
        *verify(4, 4, [], reply([], 5, stale=True)),
        *call(11, "OpenSession", {"prefix": PROMPT}, {"committed_length": 5}),  # its client lost the last reply
        *verify(5, 5, [], reply([12], 5)),
        Event("fault", "a", 0, 65, "Verify", "s", {"fault": "expire lease"}),
        *verify(6, 6, [], {"code": 5, "message": "no session"}, "refusal"),
        *call(7, "OpenSession", {"prefix": TRUTH[:6]}, {"committed_length": 6}),
        *verify(8, 6, [], {}, "cancelled"),
        *verify(9, 6, [1], reply([13], 6, replayed=True)),
        *call(10, "CloseSession", {}, {"closed": True}),
        *a_run(),
        outcome(TRUTH[3:7]),
    ]


def a_run() -> list[Event]:
    """A session of its own: messages with a right and a wrong draft, a step that follows the first, and a plain one."""
    asked = {"base_length": 3, "run_until": 7, "max_step_drafts": 2}
    events = [
        *call(20, "OpenSession", {"prefix": PROMPT}, {"committed_length": 3}),
        *(Event("message", "a", 23, 65, "VerifyStream", message=asked | {"draft_tokens": d}) for d in ([10, 11], [99])),
        *call(21, "VerifyStream", {"base_length": 3, "run_until": 1, "run": 23}, reply([10, 11, 12], 3, drafted=2)),
        *call(22, "VerifyStream", {"base_length": 6, "run_until": 1, "run": 23}, reply([13], 6, drafted=0)),
        # Its lease runs out and it is opened again; then the client reads a step that was sent before.
        Event("fault", "a", 0, 65, "VerifyStream", "r", {"fault": "expire lease"}),
        *call(24, "OpenSession", {"prefix": PROMPT}, {"committed_length": 3}),
        *call(25, "VerifyStream", {"base_length": 7, "run_until": 1, "run": 23}, reply([14], 7, drafted=0)),
    ]
    return [replace(event, session="r") for event in events]


def violations(events: list[Event]) -> set[str]:
    return {violation.rule for violation in Validator(truth, {65: 3}).check(events)}


def changed(number: int, kind: str = "reply", **said: Any) -> Callable[[list[Event]], list[Event]]:
    def change(events: list[Event]) -> list[Event]:
        return [
            replace(e, message=e.message | said) if (e.call, e.kind) == (number, kind) and e.server else e
            for e in events
        ]

    return change


def without(number: int, kind: str = "reply") -> Callable[[list[Event]], list[Event]]:
    return lambda events: [e for e in events if (e.call, e.kind) != (number, kind) or not e.server]


def ending(event: Event) -> Callable[[list[Event]], list[Event]]:
    return lambda events: [*events[:-1], event]


NOTHING = {"token_ids": [], "accepted": 0, "committed_length": 5, "replayed": False}
PLANTED = {
    "output": [ending(outcome([10, 11, 12])), ending(outcome([10, 11, 13], error="gone", may_fail=True))],
    "finished": [ending(outcome([10, 11], error="UNAVAILABLE"))],
    "committed": [changed(2, token_ids=[10, 12]), changed(22, token_ids=[77]), changed(25, token_ids=[77])],
    "prefix": [changed(7, "request", prefix=[*TRUTH[:5], 77]), changed(11, committed_length=3)],
    "growth": [changed(5, token_ids=[], committed_length=5), changed(4, stale=False)],
    "once": [changed(3, replayed=False)],
    "replay": [changed(3, token_ids=[10]), changed(5, replayed=True), changed(3, stale=True, **NOTHING)],
    "stale": [changed(4, token_ids=[11]), changed(4, committed_length=4)],
    "drafts": [changed(2, accepted=2), changed(23, "message", draft_tokens=[9])],
    "limits": [changed(23, "message", run_until=6), changed(21, drafted=1), changed(5, next_steps=[reply([77], 8)])],
    "unknown session": [lambda events: events[2:], without(7)],
    "refusal": [changed(6, "refusal", code=13)],
    "answered": [without(5), without(5, "request")],
}


def test_a_good_history_passes() -> None:
    assert violations(good()) == set()


def test_every_rule_has_a_planted_violation() -> None:
    assert PLANTED.keys() == RULES.keys()


@pytest.mark.parametrize(
    ("rule", "plant"),
    [(rule, plant) for rule, plants in PLANTED.items() for plant in plants],
    ids=lambda x: str(x)[:12],
)
def test_a_planted_violation_is_found(rule: str, plant: Callable[[list[Event]], list[Event]]) -> None:
    assert rule in violations(plant(good()))


def test_a_violation_says_its_rule_and_the_guarantee() -> None:
    (found,) = Validator(truth, {65: 3}).check([*good()[:-1], outcome([10])])
    assert str(found).startswith("output: client 65 got [10]") and "G1" in str(found)
