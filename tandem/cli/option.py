"""Declares an option once, as a dataclass field; parses command lines and values."""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeAlias, TypeVar

from tandem.cli.roles import BACKENDS
from tandem.hints import hinted, meant
from tandem.rpc.endpoint_pool import has_port, is_ipv6, joined
from tandem.speculation.sampling import member_named
from tandem.speculation.types import InvalidField, Rule

if TYPE_CHECKING:
    from tandem.rpc.credentials import Credentials

FILE: TypeAlias = str  # a type in capitals is what --help shows for the value
DIR: TypeAlias = str
LIST: TypeAlias = str
JSON: TypeAlias = str
NAME: TypeAlias = str
HOST: TypeAlias = str
URL: TypeAlias = str
SECONDS: TypeAlias = float
ADDRESS: TypeAlias = str
ADDRESSES: TypeAlias = str
ADAPTERS: TypeAlias = str
COUNT: TypeAlias = int | None  # and these are lists
FLOATS: TypeAlias = tuple[float, ...]
INTS: TypeAlias = tuple[int, ...]
NAMES: TypeAlias = tuple[str, ...]
RULES: TypeAlias = tuple[Rule, ...]
PARSERS = {"int": int, "float": float, "SECONDS": float, "Path": Path}
SHOWN = {"int": "N", "ADDRESS": "HOST:PORT", "ADDRESSES": "HOST:PORT[,...]", "ADAPTERS": "NAME=DIR,..."}
SHOWN |= dict.fromkeys(("FLOATS", "INTS", "NAMES", "RULES"), "LIST")

Parsed = TypeVar("Parsed")
Config = TypeVar("Config")
Number = TypeVar("Number", int, float)


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """A declared option. `kind`: the annotation. `also`: another name. `group`: a title of --help.

    `roles` take the flag; roles that load models, only with one of `backends`. `only` narrows a backend's roles.
    """

    name: str
    kind: str
    default: Any
    text: str
    roles: tuple[str, ...]
    backends: tuple[str, ...]
    only: Mapping[str, tuple[str, ...]]
    also: str | None
    metavar: str | None
    group: str

    def takers(self, backend: str) -> tuple[str, ...]:
        return self.only.get(backend, self.roles) if backend in self.backends else ()

    @property
    def help(self) -> str:
        """The text, after its only backend; with the default, unless the text has one."""
        backends = [name for name in self.backends if name != "toy"]
        text = f"{backends[0]}: {self.text}" if len(backends) == 1 else self.text
        if self.default in (None, False, "", ()) or "default" in self.text:
            return text
        values = self.default if isinstance(self.default, tuple) else (self.default,)
        shown = (f"{each:g}" if isinstance(each, float) else getattr(each, "value", f"{each}") for each in values)
        return f"{text} (default: {','.join(shown)})"

    @property
    def options(self) -> dict[str, Any]:
        if self.kind == "bool":
            return {"action": "store_true", "help": self.help}
        kind = self.kind.partition(" ")[0]
        metavar = self.metavar or SHOWN.get(kind) or (kind if kind.isupper() else self.name.upper())
        repeated = {"action": "append"} if kind.startswith("tuple[") else {}
        return {**repeated, "type": PARSERS.get(kind, str), "metavar": metavar, "help": self.help}

    def read(self, value: Any) -> Any:
        """The value of the option's kind, from the command line's. Raises ValueError."""
        if reader := READERS.get(self.kind):
            return reader(self.name.replace("_", "-"), value)
        return tuple(value) if isinstance(value, list) else value

    def spellings(self) -> list[str]:
        return [f"--{name}" if len(name) > 1 else f"-{name}" for name in (self.name, self.also) if name]


def option(
    text: str,
    roles: tuple[str, ...] = (),
    backends: tuple[str, ...] = BACKENDS,
    *,
    default: Any = None,
    only: Mapping[str, tuple[str, ...]] | None = None,
    also: str | None = None,
    metavar: str | None = None,
    group: str = "",
) -> Any:
    """A dataclass field as an option. `group`: the title before it and the options after it."""
    parts = {"text": text, "roles": roles, "backends": backends, "only": only or {}, "also": also, "metavar": metavar}
    return field(default=default, metadata={**parts, "group": group})


def choice(
    text: str, words: str, roles: tuple[str, ...] = (), backends: tuple[str, ...] = BACKENDS, **more: Any
) -> Any:
    """An option with one of `words`, such as auto|on|off; the first is the default."""
    return option(text, roles, backends, default=words.partition("|")[0], metavar=words, **more)


def switch(text: str, roles: tuple[str, ...] = (), backends: tuple[str, ...] = BACKENDS) -> Any:
    """An option without a value, by default False."""
    return option(text, roles, backends, default=False)


def flags_of(options: type, config: type | None = None) -> dict[str, Flag]:
    """The options of a dataclass. One without a default has that of `config`'s field."""
    others = {each.name: each.default for each in fields(config) if each.default is not MISSING} if config else {}
    found: dict[str, Flag] = {}
    group = ""
    for each in (each for each in fields(options) if "text" in each.metadata):
        group = each.metadata["group"] or group
        default = others.get(each.name) if each.default is None else each.default
        parts = {**each.metadata, "group": group}
        found[each.name] = Flag(name=each.name, kind=str(each.type), default=default, **parts)
    return found


class OptionParser(argparse.ArgumentParser, Generic[Parsed]):
    """Parses into a frozen dataclass of options, whose `given` names the options on the command line.

    `hyphens`: flags are shown as --top-p; --top_p and --top-p always mean the same. `said`: before an error's message.
    `common`: flags that --help shows first. An error is one line, exit 2.
    """

    def __init__(
        self,
        options: type[Parsed],
        flags: Mapping[str, Flag],
        hyphens: bool = False,
        said: str = "",
        common: Sequence[str] = (),
        **named: Any,
    ) -> None:
        shape = partial(argparse.RawDescriptionHelpFormatter, max_help_position=36)
        super().__init__(allow_abbrev=False, formatter_class=shape, **named)
        self._flags, self._said, self._hyphens = flags, said, hyphens
        self._parsed: Callable[..., Parsed] = options
        shown = sorted(flags.values(), key=lambda flag: flag.name not in common)  # stable
        for title, group in itertools.groupby(shown, lambda flag: "common" if flag.name in common else flag.group):
            titled = self.add_argument_group(title)
            for flag in group:
                spellings = (spelled(each, hyphens) for each in flag.spellings())
                titled.add_argument(*spellings, dest=flag.name, **flag.options, default=argparse.SUPPRESS)

    # argparse overloads this method for callers that pass a namespace; no caller here does.
    def parse_args(self, args: Sequence[str] | None = None) -> Parsed:  # type: ignore[override]
        argv = tuple(sys.argv[1:] if args is None else args)
        words = {spelled(word, self._hyphens): word for word in argv}
        parsed, unknown = self.parse_known_args([spelled(word, self._hyphens) for word in argv])
        if unknown:
            written = " ".join(words.get(word, word) for word in unknown)
            self.error(f"unrecognized arguments: {written}{self._meant(unknown)}")
        found = vars(parsed)
        try:
            found |= {name: flag.read(found[name]) for name, flag in self._flags.items() if name in found}
        except ValueError as error:
            self.error(str(error))
        values = {name: flag.default for name, flag in self._flags.items()} | found
        return self._parsed(argv=argv, given=frozenset(found) - {"role"}, **values)

    def _meant(self, unknown: Sequence[str]) -> str:
        shown = (action.option_strings for action in self._actions if action.help is not argparse.SUPPRESS)
        wrong = next((word.partition("=")[0] for word in unknown if word.startswith("--")), "")
        return meant(wrong, (each for spellings in shown for each in spellings))

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {self._said}{hinted(message)}\n")


def spelled(word: str, hyphens: bool = False) -> str:
    """A flag with underscores, or with hyphens; other words as they are."""
    if not word.startswith("--"):
        return word
    flag, equals, value = word[2:].partition("=")
    return f"--{flag.replace('_', '-') if hyphens else flag.replace('-', '_')}{equals}{value}"


def built(kind: type[Config], options: object, **computed: Any) -> Config:
    """Builds a configuration from options named like its fields; None keeps a default, `computed` overrides options."""
    same = {each.name: getattr(options, each.name, None) for each in fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: value for name, value in same.items() if value is not None} | computed)


def split_list(text: str | None) -> tuple[str, ...]:
    """The non-empty parts of a list such as `a, b`."""
    return tuple(part.strip() for part in (text or "").split(",") if part.strip())


def numbers(flag: str, text: str | None, kind: Callable[[str], Number]) -> tuple[Number, ...]:
    """The numbers of a list such as `1,2,4`. Raises ValueError."""
    try:
        return tuple(kind(part) for part in split_list(text))
    except ValueError:
        raise ValueError(f"{flag}: {text!r} is not a list of numbers, as in 1,4") from None


def auto_or_count(flag: str, text: str | None) -> int | None:
    """K of `auto|K`; None for `auto` or no text. Raises ValueError."""
    if text is None or text == "auto":
        return None
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{flag}: {text!r} is neither a number nor auto") from None


READERS: Mapping[str, Callable[[str, str], Any]] = {
    "COUNT": auto_or_count,
    "FLOATS": partial(numbers, kind=float),
    "INTS": partial(numbers, kind=int),
    "NAMES": lambda flag, text: split_list(text),
    "RULES": lambda flag, text: tuple(member_named(Rule, flag, name) for name in split_list(text)),
}


def with_default_ports(hosts: str, port: int) -> str:
    """HOST:PORT for each HOST or HOST:PORT of a list."""
    found: list[str] = []
    for host in map(str.strip, hosts.split(",")):
        before, _, last = host.rpartition(":")
        if "://" in host or has_port(host):  # of which the former is refused where addresses are checked
            found.append(host)
        elif last.isdecimal() and is_ipv6(before):
            other = f"[{host}], or have a port, [{before}]:{last}"
            raise InvalidField("target_host", f"{host!r} may be an address, {other}")
        else:
            found.append(joined(host, port, "target_host"))
    return ",".join(found)


def credentials(options: Any) -> Credentials:
    from tandem.rpc.credentials import OPTIONS, Credentials

    return Credentials(**{field: getattr(options, option) for option, field in OPTIONS.items()})
