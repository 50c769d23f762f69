"""Adds up the costs of one session's rounds, for --profile."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from tandem.speculation.types import SpeculationStats

Note = Callable[[str, int, SpeculationStats, float], None]
"""Called with how a session ended, its prompt's tokens, the target's statistics and the seconds it was open."""


@dataclass(slots=True)
class SessionCosts:
    """Costs of a session that was opened with `prompt_tokens` tokens."""

    prompt_tokens: int
    stats: SpeculationStats = field(default_factory=SpeculationStats)
    started: float = field(default_factory=time.perf_counter)

    def report(self, how: str, note: Note) -> None:
        note(how, self.prompt_tokens, self.stats, time.perf_counter() - self.started)
