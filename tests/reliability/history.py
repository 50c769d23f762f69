"""What happened: every request, reply, refusal and fault of a server, and what clients ended with."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from google.protobuf.json_format import MessageToDict

ENDS = ("reply", "refusal", "cancelled")
"""Kinds of event that end a call of one reply."""


@dataclass(frozen=True, slots=True)
class Event:
    """One line of a history. `call` ties a reply to its request; `server` is one life of one server process.

    kinds: request, reply, refusal, cancelled, fault (servers say these), outcome (clients).
    """

    kind: str
    server: str = ""
    call: int = 0
    client: int = -1
    method: str = ""
    session: str = ""
    message: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        said = {name: value for name, value in self.message.items() if value not in (0, 0.0, "", [], False, None)}
        return f"{self.server}#{self.call} client {self.client} {self.method} {self.kind} {self.session[:8]} {said}"


class History:
    """Events in the order they happened here. With a `path`, each is written at once and outlives kill -9."""

    def __init__(self, server: str = "", path: Path | None = None) -> None:
        self.server, self.events = server, list[Event]()
        self.open_calls: set[int] = set()
        self._calls = 0
        self._file = None if path is None else os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def __iter__(self) -> Iterator[Event]:
        return iter(self.events)

    def add(self, event: Event) -> None:
        self.events.append(event)
        if self._file is not None:
            os.write(self._file, (json.dumps(asdict(event)) + "\n").encode())

    def begin(self, client: int, method: str, session: str, request: Any, **more: Any) -> Call:
        """A request that reached the service."""
        self._calls += 1
        call = Call(self, self._calls, client, method, session)
        call.note("request", **fields_of(request), **more)
        return call

    def fault(self, client: int, method: str, kind: str, session: str = "", **said: Any) -> None:
        self.add(Event("fault", self.server, 0, client, method, session, {"fault": kind, **said}))

    def outcome(self, client: int, **said: Any) -> None:
        """What a client ended with: its `tokens`, and its `error` if it ended with one."""
        self.add(Event("outcome", client=client, message=said))


@dataclass(frozen=True, slots=True)
class Call:
    """One call on its way through a server."""

    history: History
    number: int
    client: int
    method: str
    session: str

    @property
    def open(self) -> bool:
        """Whether its end has not been noted."""
        return self.number in self.history.open_calls

    def note(self, kind: str, **said: Any) -> None:
        if kind == "request":
            self.history.open_calls.add(self.number)
        elif kind in ENDS:
            self.history.open_calls.discard(self.number)
        self.history.add(
            Event(kind, self.history.server, self.number, self.client, self.method, self.session, dict(said))
        )

    def reply(self, message: Any) -> None:
        self.note("reply", **fields_of(message))


def fields_of(message: Any) -> dict[str, Any]:
    """A protobuf message as plain data."""
    return MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)


def read(path: Path) -> list[Event]:
    """A history that a server wrote. The line that a kill cut short is left out."""
    events = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            events.append(Event(**json.loads(line)))
        except ValueError:
            break
    return events


def count_faults(events: Iterable[Event]) -> Counter[str]:
    return Counter(event.message["fault"] for event in events if event.kind == "fault")
