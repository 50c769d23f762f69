"""Writes what completes `tandem` in bash, zsh and fish, from the declarations of roles and flags."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from tandem.cli.compare_flags import COMPARE_FLAGS
from tandem.cli.flags import FLAGS
from tandem.cli.option import Flag
from tandem.cli.role_names import SERVE
from tandem.cli.roles import COMMANDS, COMPARE, COMPLETION, ROLES

_VALUE = re.compile(r"[a-z][a-z0-9_-]*")
_BASH = """\
_tandem() {
  local current=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD-1]} role=${COMP_WORDS[1]} words=""
  if [[ $role == --role ]]; then role=${COMP_WORDS[2]}; fi
  if (( COMP_CWORD == 1 )) || [[ $previous == --role ]]; then
    words="%(names)s"
  elif [[ $current == -* ]]; then
    case $role in
%(flags)s
    esac
  else
    case $previous in
%(values)s
    esac
  fi
  COMPREPLY=($(compgen -W "$words" -- "$current"))
}
complete -o default -F _tandem tandem
"""
_ZSH = "autoload -Uz compinit bashcompinit && compinit -u && bashcompinit\n" + _BASH
SHELLS = ("bash", "zsh", "fish")


class _Command(NamedTuple):
    """What stands first on the command line; `hyphens`: its flags are shown with them."""

    help: str
    flags: Mapping[str, Flag]
    hyphens: bool = False


def script(shell: str) -> str:
    """Returns the script of a shell. Raises ValueError if there is none for it."""
    if shell not in SHELLS:
        raise ValueError(f"completion: {shell!r} is not one of {', '.join(SHELLS)}")
    found = {name: _Command(role.help, _flags(name)) for name, role in ROLES.items()}
    found |= {SERVE: _Command(COMMANDS[SERVE], _flags("fused_target"))}
    found |= {COMPARE: _Command(COMMANDS[COMPARE], COMPARE_FLAGS, hyphens=True)}
    found |= {COMPLETION: _Command(COMMANDS[COMPLETION], {})}
    if shell == "fish":
        return "".join(f"complete -c tandem {line}\n" for line in _fish(found))
    flags = (f"      {name}) words={' '.join(_spelled(each))!r};;" for name, each in found.items() if each.flags)
    values = {
        spelling: _values(flag)
        for each in found.values()
        for flag in each.flags.values()
        if _values(flag)
        for spelling in flag.spellings(False)
    }
    values[COMPLETION] = SHELLS
    cases = (f"      {spelling}) words={' '.join(words)!r};;" for spelling, words in values.items())
    parts = {"names": " ".join(found), "flags": "\n".join(flags), "values": "\n".join(cases)}
    return (_ZSH if shell == "zsh" else _BASH) % parts


def _flags(role: str) -> dict[str, Flag]:
    return {name: flag for name, flag in FLAGS.items() if role in flag.roles}


def _spelled(command: _Command) -> list[str]:
    return [*(flag.spellings(command.hyphens)[0] for flag in command.flags.values()), "--help"]


def _values(flag: Flag) -> tuple[str, ...]:
    """Returns the words among which a value is chosen, as its metavar has them; none for others."""
    return tuple(filter(_VALUE.fullmatch, (flag.metavar or "").split("|")))


def _fish(found: Mapping[str, _Command]) -> Iterator[str]:
    for name, command in found.items():
        yield f"-n __fish_use_subcommand -f -a {name} -d {_quoted(command.help)}"
        for flag in command.flags.values():
            values = f" -f -a {_quoted(' '.join(_values(flag)))}" if _values(flag) else ""
            takes = "" if flag.kind == "bool" else f" -r{values}"
            names = "".join(f" -l {spelling[2:]}" for spelling in flag.spellings(command.hyphens)[:1])
            yield f"-n '__fish_seen_subcommand_from {name}'{names}{takes} -d {_quoted(flag.text)}"
    yield f"-n '__fish_seen_subcommand_from {COMPLETION}' -f -a '{' '.join(SHELLS)}'"


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
