"""Prints the decision for a round trip and a number of clients (`--role advise`)."""

from __future__ import annotations

from pathlib import Path

from tandem.comparison.analysis.comparison import read_comparison
from tandem.comparison.report import sentences


def run_advice(report: Path, rtt_ms: float | None = None, clients: int = 1) -> int:
    """Prints and returns the exit code. `rtt_ms` None: the base's. Raises ValueError."""
    found = read_comparison(report)
    verdict = found.decide(rtt_ms, clients)
    if verdict is None:
        print(sentences.undecided(found))
        return 0
    ratios = [f"  {line}" for line in sentences.ratios(verdict)] if verdict.decided else []
    print("\n".join([*found.caveats, verdict.sentence, *sentences.doubts(verdict.doubt), *ratios]))
    return 0
