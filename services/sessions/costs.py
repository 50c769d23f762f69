"""What the rounds of one session add up to, for --profile."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from tandem.speculation.types import SpeculationStats

Note = Callable[[str, int, SpeculationStats, float], None]
"""Told how a session ended, its prompt's tokens, what its rounds cost beside the target, and seconds it was open."""


@dataclass(slots=True)
class SessionCosts:
    """Of a session that was opened with a prompt of so many tokens."""

    prompt_tokens: int
    stats: SpeculationStats = field(default_factory=SpeculationStats)
    started: float = field(default_factory=time.perf_counter)

    def tell(self, how: str, note: Note) -> None:
        note(how, self.prompt_tokens, self.stats, time.perf_counter() - self.started)
