"""Measures the costs of drafting and verifying with short requests at every speculation length."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from tandem.comparison.measuring.architectures import NOT_COSTED, PLAIN
from tandem.comparison.measuring.records import Measurement
from tandem.comparison.measuring.run import Contender, measure
from tandem.comparison.measuring.workloads import Prompt
from tandem.speculation.types import GenerationRequest

TOKENS = 24  # about twenty steps, enough for a mean
SAMPLES = 2  # least requests for each length and architecture


@dataclass(frozen=True, slots=True)
class Calibration:
    """One calibration request with `length` draft tokens per round."""

    architecture: str
    length: int
    measurement: Measurement


class Calibrator:
    """Sends calibration requests spread over the run, apart from the measured ones; ignores failures."""

    def __init__(
        self,
        contenders: Sequence[Contender],
        request: GenerationRequest,
        lengths: Sequence[int],
        prompts: int,
        on_found: Callable[[Calibration], None],
    ) -> None:
        self._speculating = [c for c in contenders if c.name not in NOT_COSTED]
        self._plain = [c for c in contenders if c.name in PLAIN]
        self._request = replace(request, max_new_tokens=min(TOKENS, request.max_new_tokens or TOKENS))
        self._lengths: Iterator[int] = itertools.cycle(lengths or (0,))
        self._each_time = math.ceil(SAMPLES * len(lengths) / prompts)
        self._on_found = on_found

    async def after_prompt(self, prompt: Prompt) -> None:
        """Sends a plain request, and one to each speculating architecture at each length that is due."""
        for contender in self._plain:
            await self._ask(contender, prompt, 0)
        for length in itertools.islice(self._lengths, self._each_time):
            for contender in self._speculating:
                await self._ask(contender, prompt, length)

    async def _ask(self, contender: Contender, prompt: Prompt, length: int) -> None:
        request = replace(self._request, speculation_length=length)
        try:
            measurement = await measure(contender, prompt.into(request))
        except Exception:  # the measured requests to the same server report what is wrong
            return
        self._on_found(Calibration(contender.name, length, measurement))
