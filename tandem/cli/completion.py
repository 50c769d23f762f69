"""Shell completion of `tandem` for bash and zsh, by the declared roles and flags."""

from __future__ import annotations

import re
from collections.abc import Mapping

from tandem.cli.compare_flags import COMPARE_FLAGS
from tandem.cli.flags import FLAGS
from tandem.cli.option import Flag
from tandem.cli.role_names import SERVE
from tandem.cli.roles import COMPARE, COMPLETION, ROLES

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
SHELLS = ("bash", "zsh")


def script(shell: str) -> str:
    """A shell's script. Raises ValueError for an unknown shell."""
    if shell not in SHELLS:
        raise ValueError(f"completion: {shell!r} is not one of {', '.join(SHELLS)}")
    found: dict[str, Mapping[str, Flag]] = {name: _flags(name) for name in ROLES}
    found |= {SERVE: _flags("fused_target"), COMPARE: COMPARE_FLAGS, COMPLETION: {}}
    flags = (f"      {name}) words={' '.join(_spelled(name, each))!r};;" for name, each in found.items() if each)
    values = {
        spelling: _values(flag)
        for each in found.values()
        for flag in each.values()
        if _values(flag)
        for spelling in flag.spellings(False)
    }
    values[COMPLETION] = SHELLS
    cases = (f"      {spelling}) words={' '.join(words)!r};;" for spelling, words in values.items())
    parts = {"names": " ".join(found), "flags": "\n".join(flags), "values": "\n".join(cases)}
    return (_ZSH if shell == "zsh" else _BASH) % parts


def _flags(role: str) -> dict[str, Flag]:
    return {name: flag for name, flag in FLAGS.items() if role in flag.roles}


def _spelled(name: str, flags: Mapping[str, Flag]) -> list[str]:
    return [*(flag.spellings(name == COMPARE)[0] for flag in flags.values()), "--help"]


def _values(flag: Flag) -> tuple[str, ...]:
    """The words of a choice, from its metavar; empty for other flags."""
    return tuple(filter(_VALUE.fullmatch, (flag.metavar or "").split("|")))
