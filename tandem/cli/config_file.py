"""--config FILE: flags in YAML. The command line takes precedence."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

from tandem.cli.option import Flag
from tandem.hints import meant

YES, NO = ("true", "yes", "on"), ("false", "no", "off")


def with_config(argv: Sequence[str], flags: Mapping[str, Flag]) -> tuple[str, ...]:
    """Puts the flags of --config before the other arguments. Raises ValueError."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    first.add_argument("--config", type=Path)
    try:
        found, rest = first.parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise ValueError("config: give --config FILE") from error
    if found.config is None:
        return tuple(argv)
    names = {spelling: name for name, flag in flags.items() for spelling in flag.spellings(False)} | {"--role": "role"}
    given = {names.get(word.partition("=")[0]) for word in rest}
    words: list[str] = []
    for key, value in _settings(found.config).items():
        if (name := names.get(f"--{key}")) is None:
            raise ValueError(f"config: {found.config}: no flag is called {key!r}{meant(key, names.values())}")
        if name not in given:
            words += _words(name, flags[name].kind if name in flags else "str", value, found.config)
    return (*words, *rest)


def _settings(path: Path) -> dict[str, object]:
    import yaml

    try:
        # Every value as it is written: YAML takes `off` and `on`, which some flags have as values, for booleans.
        read = yaml.load(path.read_text(encoding="utf-8"), Loader=yaml.BaseLoader)
    except OSError as error:
        raise ValueError(f"config: {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"config: {path}: {error}") from None
    if not isinstance(read, dict):
        raise ValueError(f"config: {path}: it must have lines `flag: value`")
    return {str(key): value for key, value in read.items()}


def _words(name: str, kind: str, value: object, path: Path) -> list[str]:
    given = value if isinstance(value, list) else [value]
    values = [each for each in given if isinstance(each, str)]
    if len(values) < len(given):
        raise ValueError(f"config: {path}: {name}: not the value of a flag; JSON stands in quotes, as one string")
    if kind == "bool":
        if value not in (*YES, *NO):
            raise ValueError(f"config: {path}: {name}: {value!r} is neither true nor false")
        return [f"--{name}"] if value in YES else []
    return [f"--{name}={each}" for each in (values if kind.startswith("tuple[") else [",".join(values)])]
