"""A history checked against the contract: what may never happen, whatever the faults were.

It knows nothing of our code: it follows every session by what was asked and answered, beside what the target alone
says (G1). The checks are named in RULES; a test plants a violation of each.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tests.reliability.history import Event

RULES = {
    "output": "G1: a client's tokens are the target's own; where it ended with an error, a prefix of them",
    "finished": "a client whose servers are back ends with all its tokens",
    "committed": "G1: a committed token is the target's own, and never changes",
    "prefix": "G4: a session is opened only with tokens that are the target's own",
    "growth": "G2: a round is applied at the committed length and adds at least one token",
    "once": "G2: a round is applied once",
    "replay": "G2: a repeated round gets the recorded reply",
    "stale": "G2: a stale reply applies nothing and says the committed length",
    "drafts": "G3: accepted tokens are the drafts that were sent, and one more",
    "limits": "a run goes no further than its messages and what was acknowledged allow, and verifies no more drafts",
    "unknown session": "G5: a session that is not open is not found",
    "refusal": "a refusal has a declared status: never INTERNAL, never UNKNOWN",
    "answered": "every call ends",
}
_REFUSALS = {1, 3, 4, 5, 6, 8, 9, 10, 11, 12, 14}  # google.rpc.Code without UNKNOWN, INTERNAL and what we never say
MAX_UNREAD = 256
"""Tokens that a run may be ahead of those acknowledged."""
_VOLATILE = ("replayed", "server_seconds", "messages_read")
Truth = Callable[[int, int], Sequence[int]]
"""(client, count) → prompt and the first `count` tokens that the target alone says after it, past its end."""


@dataclass(frozen=True, slots=True)
class Violation:
    rule: str
    what: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.what}  [{RULES[self.rule]}]"


@dataclass(slots=True)
class _Session:
    """A session of one server life. `loose`: rounds whose caller left; they may or may not have been applied.

    `runs`: it has stepped on without waiting, so that it may hold steps that nobody was told. `sent`: the drafts that
    its runs were sent, each with the length where it begins. `until`, `read`, `width`: the most that any message of
    theirs allowed. `unanswered`: a run began before its opening was answered. `streams`: the calls of its runs.
    """

    tokens: list[int]
    recorded: dict[int, dict[str, Any]] = field(default_factory=dict)
    loose: set[int] = field(default_factory=set)
    runs: bool = False
    sent: list[tuple[int, list[int]]] = field(default_factory=list)
    until: int = 0
    read: int = 0
    width: int = 0
    unanswered: bool = False
    streams: set[tuple[str, int]] = field(default_factory=set)

    def drafted(self, base: int, tokens: list[int]) -> bool:
        """Whether `tokens`, which follow `base` committed ones, are part of a draft that was sent."""
        text = [*self.tokens[:base], *tokens]
        return any(at <= base and path[: len(text) - at] == text[at:] for at, path in self.sent)


class Validator:
    """Feed it events in order, then ask for `violations`."""

    def __init__(self, truth: Truth, prompts: dict[int, int]) -> None:
        """`prompts`: client → length of its prompt."""
        self._truth, self._prompts = truth, prompts
        self._sessions: dict[tuple[str, str], _Session] = {}
        self._asked: dict[tuple[str, str], tuple[int, list[int]]] = {}  # who opens, with which prefix, answered or not
        self._open_calls: dict[tuple[str, int], Event] = {}
        self._said: dict[tuple[str, int], list[int]] = {}
        self._over: set[tuple[str, int]] = set()  # runs of sessions that ended, whose last steps may still be sent
        self.violations: list[Violation] = []

    def check(self, events: Iterable[Event], all_ended: bool = True) -> list[Violation]:
        for event in events:
            self._take(event)
        if all_ended:
            for request in self._open_calls.values():
                self._broken("answered", f"no end of {request}")
        return self.violations

    @property
    def open_calls(self) -> int:
        """Calls of which no end was fed."""
        return len(self._open_calls)

    def _broken(self, rule: str, what: Any) -> None:
        self.violations.append(Violation(rule, str(what)))

    def _take(self, event: Event) -> None:
        key, whose = (event.server, event.call), (event.server, event.session)
        if event.client < 0 and whose in self._asked:  # its stream began before the opening, which says whose it is
            event = replace(event, client=self._asked[whose][0])
        if event.kind == "request":
            self._open_calls[key] = event
            if event.method == "OpenSession":
                self._asked[whose] = event.client, list(event.message["prefix"])
                if whose in self._sessions and not self._sessions[whose].tokens:
                    self._sessions[whose].tokens = list(event.message["prefix"])
        elif event.kind == "outcome":
            self._outcome(event)
        elif event.kind == "message":
            self._heard(event)
        elif event.kind == "fault":
            if event.message["fault"] == "expire lease" and (ended := self._sessions.pop(whose, None)):
                self._over |= ended.streams
        elif event.method == "Generate" and event.kind == "reply":
            self._generated(event)
        else:
            request = self._open_calls.pop(key, None)
            if request is None and event.method == "Generate":
                return  # its completion was the end; then its stream broke
            if request is None:
                self._broken("answered", f"an end without a request: {event}")
            else:
                self._ended(request, event)

    def _heard(self, event: Event) -> None:
        """A message of a run. It may come before the opening of its session, and steps before that is answered."""
        said, key = event.message, (event.server, event.session)
        opening = any((e.server, e.session, e.method) == (*key, "OpenSession") for e in self._open_calls.values())
        if said.get("opening_sent") or opening:
            self._sessions.setdefault(key, _Session(list(self._asked.get(key, (-1, []))[1]), unanswered=True))
        session = self._sessions.get(key)
        if session is None:
            return
        session.runs, draft = True, said["draft_tokens"]
        session.until = max(session.until, said["run_until"])
        session.read = max(session.read, said["base_length"])
        session.width = max(session.width, said["max_step_drafts"])
        session.sent.append((said["base_length"], draft))
        session.streams.add((event.server, event.call))

    def _ended(self, request: Event, end: Event) -> None:
        session = self._sessions.get((end.server, end.session))
        if end.kind == "run":
            return
        if end.kind == "cancelled":
            if session is not None and "base_length" in request.message:
                session.loose.add(request.message["base_length"])
        elif end.kind == "refusal":
            if end.message["code"] not in _REFUSALS:
                self._broken("refusal", end)
        elif end.method == "OpenSession":
            self._opened(request, end)
        elif end.method == "CloseSession":
            self._sessions.pop((end.server, end.session), None)
        elif end.method in ("Verify", "VerifyStream"):
            self._verified(session, request.message, end)

    # --- sessions ---

    def _opened(self, request: Event, reply: Event) -> None:
        prefix, committed = list(request.message["prefix"]), reply.message["committed_length"]
        self._compare("prefix", reply, prefix)
        key = (reply.server, reply.session)
        known = self._sessions.get(key)
        if known is not None and known.runs:
            loose = {len(prefix)} if committed > len(prefix) or known.unanswered else set[int]()
            tokens, read = known.tokens if known.unanswered else prefix, max(known.read, len(prefix))
            self._sessions[key] = replace(known, tokens=tokens, recorded={}, loose=loose, read=read, unanswered=False)
            return
        if known is not None and _lacks_last_round(known, prefix):  # it stays committed, to be replayed (G3)
            if committed != len(known.tokens):
                self._broken("prefix", f"{reply} to a prefix that lacks the last round of {len(known.tokens)}")
            return
        if committed != len(prefix) and not (known is not None and len(prefix) in known.loose):
            self._broken("prefix", f"{reply} to a prefix of {len(prefix)}")
        if known is None or (known.tokens != prefix and committed == len(prefix)):
            self._sessions[key] = _Session(prefix)

    def _verified(self, session: _Session | None, asked: dict[str, Any], reply: Event) -> None:
        said = reply.message
        if "run_until" in asked and not said["stale"] and not said["replayed"]:
            if session is None or (reply.server, asked.get("run")) in self._over:
                self._compare_step(asked["base_length"], reply)
            else:
                self._ran(session, asked["base_length"], reply)
        elif session is None:
            self._broken("unknown session", reply)
        elif said["stale"]:
            unseen = session.loose or session.runs
            if said["token_ids"] or (said["committed_length"] != len(session.tokens) and not unseen):
                self._broken("stale", f"{reply} while {len(session.tokens)} are committed")
            elif _is_repeated(session, asked):
                self._broken("replay", f"{reply} at {asked['base_length']}, the last round's base: it was recorded")
        elif said["replayed"]:
            self._replayed(session, asked, reply)
        else:
            self._applied(session, asked, reply)

    def _replayed(self, session: _Session, asked: dict[str, Any], reply: Event) -> None:
        base = asked["base_length"]
        recorded = session.recorded.get(base)
        if session.runs or (recorded is None and base in session.loose):  # of a run, the last steps may not be told
            self._append(session, base, reply)
        elif recorded is None or recorded != _lasting(reply.message):
            self._broken("replay", f"{reply}, recorded was {recorded}")

    def _applied(self, session: _Session, asked: dict[str, Any], reply: Event) -> None:
        base, said = asked["base_length"], reply.message
        if base in session.recorded:
            self._broken("once", f"{reply} at {base}, applied before")
        if base != len(session.tokens) and not session.loose:
            self._broken("growth", f"{reply} at {base} while {len(session.tokens)} are committed")
        if not said["token_ids"] or said["committed_length"] != base + len(said["token_ids"]):
            self._broken("growth", f"{reply} at {base}")
        accepted = said["accepted"]
        if accepted != len(said["token_ids"]) - 1 or said["token_ids"][:accepted] != asked["draft_tokens"][:accepted]:
            self._broken("drafts", f"{reply} to drafts {asked['draft_tokens']}")
        if more := said.get("next_steps"):
            self._broken("limits", f"{reply}: {len(more)} steps more")
        self._append(session, base, reply)

    def _ran(self, session: _Session, base: int, reply: Event) -> None:
        """A step of a run. Steps of a run that ended may be seen after those of the next."""
        said, accepted = reply.message, reply.message["accepted"]
        tokens, grown = said["token_ids"], [*session.tokens[:base], *said["token_ids"]]
        if not tokens or said["committed_length"] != base + len(tokens):
            self._broken("growth", f"{reply} at {base}")
        most = min(session.until, max(session.read, self._prompts.get(reply.client, 0)) + MAX_UNREAD)
        if said["committed_length"] > most or said["drafted"] > session.width or accepted > said["drafted"]:
            self._broken("limits", f"{reply}: at most {most} tokens, {session.width} drafts")
        if base > len(session.tokens):  # steps between them were not told
            self._compare_step(base, reply)
            return
        if accepted != len(tokens) - 1 or (accepted and not session.drafted(base, tokens[:accepted])):
            self._broken("drafts", f"{reply} at {base}")
        if grown[: len(session.tokens)] != session.tokens[: len(grown)]:
            self._broken("committed", f"{reply} changes tokens from {base} on")
        if len(grown) > len(session.tokens):
            session.tokens = grown
            session.recorded[base] = _lasting(said)
        self._compare("committed", reply, grown)

    def _append(self, session: _Session, base: int, reply: Event) -> None:
        tokens = [*session.tokens[:base], *reply.message["token_ids"]]
        if tokens[: len(session.tokens)] != session.tokens[: len(tokens)]:
            self._broken("committed", f"{reply} changes tokens from {base} on")
        session.tokens = tokens
        session.recorded[base] = _lasting(reply.message)
        session.loose.discard(base)
        self._compare("committed", reply, tokens)

    def _compare_step(self, base: int, reply: Event) -> None:
        """Compares a step's tokens with the target's own behind its first `base` tokens."""
        if (prompt := self._prompts.get(reply.client)) is not None:
            before = list(self._truth(reply.client, max(0, base - prompt)))[:base]
            self._compare("committed", reply, [*before, *reply.message["token_ids"]])

    def _compare(self, rule: str, event: Event, tokens: list[int]) -> None:
        prompt = self._prompts.get(event.client)
        if prompt is None:
            return
        truth = list(self._truth(event.client, max(0, len(tokens) - prompt)))
        if tokens != truth[: len(tokens)]:
            at = next(i for i, (ours, true) in enumerate(itertools.zip_longest(tokens, truth)) if ours != true)
            self._broken(
                rule, f"{event}: token {at} is {tokens[at : at + 1]}, the target alone says {truth[at : at + 1]}"
            )

    # --- outputs ---

    def _generated(self, reply: Event) -> None:
        said = self._said.setdefault((reply.server, reply.call), [])
        said += reply.message.get("chunk", {}).get("token_ids", [])
        if reply.client in self._prompts:
            prompt = list(self._truth(reply.client, 0))
            self._compare("committed", reply, prompt + said)
        if "completion" in reply.message:
            self._open_calls.pop((reply.server, reply.call), None)

    def _outcome(self, event: Event) -> None:
        tokens, expected = list(event.message["tokens"]), list(event.message["expected"])
        error = event.message.get("error")
        if error and not event.message.get("may_fail"):
            self._broken("finished", f"client {event.client} ended with {error} after {len(tokens)} tokens")
        if tokens != (expected[: len(tokens)] if error else expected):
            self._broken("output", f"client {event.client} got {tokens}, the target alone says {expected}")


def _is_repeated(session: _Session, asked: dict[str, Any]) -> bool:
    """Whether a round is the last one that was applied, sent again. What a run made last may not have been told."""
    base = asked["base_length"]
    last = max(session.recorded, default=-1)
    return not session.loose and not session.runs and base == last and session.tokens[base - 1] == asked["last_token"]


def _lacks_last_round(session: _Session, prefix: list[int]) -> bool:
    return (
        len(prefix) < len(session.tokens)
        and len(prefix) == max(session.recorded, default=-1)
        and prefix == session.tokens[: len(prefix)]
    )


def _lasting(reply: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in reply.items() if name not in _VOLATILE}
