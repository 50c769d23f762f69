"""Holds the raw measurements of one comparison while it runs."""

from __future__ import annotations

from dataclasses import dataclass, field

from tandem.comparison.analysis.identity import MarginTrace
from tandem.comparison.links.overhead import LinkOverhead
from tandem.comparison.measuring.calibration import Calibration
from tandem.comparison.measuring.conditions import LinkChoice
from tandem.comparison.measuring.config import ComparisonConfig
from tandem.comparison.measuring.deployment import Endpoint
from tandem.comparison.measuring.environment import Machine, Versions
from tandem.comparison.measuring.records import Failure, Record

UNENDED = "the run has not ended, or was killed"


@dataclass
class RunData:
    """All raw measurements, in the order in which they were made.

    margins: by condition and prompt. ended: whether the run recorded its end. cut_short: why the run ended early; None
    if everything was measured.
    """

    config: ComparisonConfig
    machine: Machine
    versions: Versions
    started_at: str
    endpoints: tuple[Endpoint, ...] = ()
    warm_up_failures: dict[str, Failure] = field(default_factory=dict)
    links: dict[LinkChoice, LinkOverhead] = field(default_factory=dict)
    records: list[Record] = field(default_factory=list)
    calibrations: list[Calibration] = field(default_factory=list)
    margins: dict[tuple[str, str], MarginTrace] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)
    ended: bool = False
    cut_short: str | None = None

    @property
    def planned(self) -> int:
        """The number of requests to measure."""
        config = self.config
        alone = len(config.conditions) * len(config.prompts) * config.num_runs
        return max(len(self.endpoints), len(config.architectures)) * (
            alone + sum(load.requests for load in config.loads)
        )

    @property
    def missing(self) -> str | None:
        """Why measurements are missing; None if the run is complete."""
        return self.cut_short if self.ended else UNENDED
