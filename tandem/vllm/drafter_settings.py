"""Reads the drafter's settings from environment variables: vLLM passes none."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from tandem.rpc.credentials import OPTIONS, Credentials
from tandem.rpc.endpoint_pool import parse_addresses
from tandem.speculation.errors import InvalidField

PREFIX = "TANDEM_DRAFT_"
_BOUNDS = {"budget_ms": (0, 1e6), "answer_seconds": (1e-3, 1e6), "metrics_port": (0, 65535)}
_TRUE, _FALSE = ("1", "true", "yes"), ("", "0", "false", "no")


@dataclass(frozen=True, slots=True)
class Settings:
    """`budget_ms`: for drafts of a step; 0: none. `answer_seconds`: a worker silent for longer has failed."""

    workers: tuple[str, ...]
    budget_ms: float = 30.0
    answer_seconds: float = 2.0
    metrics_port: int | None = None
    tokenizer_sha256: str | None = None
    credentials: Credentials = field(default_factory=Credentials)

    def __post_init__(self) -> None:
        if not self.workers:
            raise InvalidField("workers", f"none is named; set {PREFIX}WORKERS=host:port[,host:port...]")
        parse_addresses(",".join(self.workers), "workers")
        for name, (least, most) in _BOUNDS.items():
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
                raise InvalidField(name, f"{value:g} is outside {least:g} to {most:g}")
        self.credentials.check(",".join(self.workers))


def settings_of(environment: Mapping[str, str]) -> Settings:
    given = {name.removeprefix(PREFIX).lower(): value for name, value in environment.items() if name.startswith(PREFIX)}
    known = {each.name for each in fields(Settings)} - {"credentials"} | set(OPTIONS)
    if unknown := sorted(set(given) - known):
        raise InvalidField(unknown[0], f"there is no such setting; there are {', '.join(sorted(known))}")
    credentials: dict[str, Any] = {OPTIONS[name]: given.pop(name) for name in list(given) if name in OPTIONS}
    if "insecure" in credentials:
        credentials["insecure"] = _switch("insecure", credentials["insecure"])
    read = {name: _READ[name](name, value) for name, value in given.items()}
    return Settings(**{"workers": (), **read}, credentials=Credentials(**credentials))


def _number(name: str, value: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise InvalidField(name, f"{value!r} is not a number") from None


def _whole(name: str, value: str) -> int:
    number = _number(name, value)
    if not number.is_integer():
        raise InvalidField(name, f"{value!r} is not a whole number")
    return int(number)


def _switch(name: str, value: str) -> bool:
    if value.lower() not in (*_TRUE, *_FALSE):
        raise InvalidField(name, f"{value!r} is neither true nor false")
    return value.lower() in _TRUE


def _addresses(name: str, value: str) -> tuple[str, ...]:
    return tuple(one.strip() for one in value.split(",") if one)


_READ: Mapping[str, Callable[[str, str], Any]] = {
    "workers": _addresses,
    "budget_ms": _number,
    "answer_seconds": _number,
    "metrics_port": _whole,
    "tokenizer_sha256": lambda name, value: value,
}
