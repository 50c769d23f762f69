"""Short requests at every speculation length, between the measured ones: what a draft and a verification cost.

They are requests of their own, so a prediction made from them says something about the measurements beside it; and they
are spread over the whole run, so a machine that slows down slows both.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from tandem.comparison.measuring.architectures import AUTOREGRESSIVE, PIPELINED, WIDTH_1
from tandem.comparison.measuring.records import Measurement
from tandem.comparison.measuring.run import Contender, RequestSettings, measure
from tandem.comparison.measuring.workloads import Prompt

TOKENS = 24
"""Of a calibrating request: some twenty steps, so that a mean is worth something."""
SAMPLES = 2
"""Requests for each length and architecture, at the least."""
PLAIN = (AUTOREGRESSIVE.name, WIDTH_1.name)
NOT_COSTED = (*PLAIN, PIPELINED.name)
"""Whose rounds overlap has no costs of its own: its bound is made from those of stop-and-wait."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """One short request: `length` draft tokens were asked for a round."""

    architecture: str
    length: int
    measurement: Measurement


class Calibrator:
    """Makes the requests, a few after every measured prompt. A request that fails is left out."""

    def __init__(
        self,
        contenders: Sequence[Contender],
        settings: RequestSettings,
        lengths: Sequence[int],
        prompts: int,
        on_found: Callable[[Calibration], None],
    ) -> None:
        self._speculating = [c for c in contenders if c.name not in NOT_COSTED]
        self._plain = [c for c in contenders if c.name in PLAIN]
        self._predicts = bool(self._plain and self._speculating and lengths)
        self._settings = replace(settings, max_new_tokens=min(TOKENS, settings.max_new_tokens))
        self._lengths: Iterator[int] = itertools.cycle(lengths or (0,))
        self._each_time = math.ceil(SAMPLES * len(lengths) / prompts)
        self._on_found = on_found

    async def after_prompt(self, prompt: Prompt) -> None:
        """One plain request, and one of each speculating architecture at each of the lengths whose turn it is.

        Nothing where plain decoding or drafts are missing: no prediction could be made from the rest.
        """
        if not self._predicts:
            return
        for contender in self._plain:
            await self._ask(contender, prompt, 0)
        for length in itertools.islice(self._lengths, self._each_time):
            for contender in self._speculating:
                await self._ask(contender, prompt, length)

    async def _ask(self, contender: Contender, prompt: Prompt, length: int) -> None:
        settings = replace(self._settings, speculation_length=length)
        try:
            measurement = await measure(contender, settings.request(prompt), settings.timeout_s)
        except Exception:  # the same server's measured requests say what is wrong with it
            return
        self._on_found(Calibration(contender.name, length, measurement))
