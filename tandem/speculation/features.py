"""Hidden states of a target's layers, as bytes for a draft head elsewhere: by position, then layer; little-endian."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tandem.speculation.sampling import InvalidField

MAX_LAYERS = 8
DEFAULT_CONTEXT = 256


@dataclass(frozen=True, slots=True)
class FeatureSpec:
    """A session's features: after these layer counts, `hidden_size` units each."""

    layers: tuple[int, ...]
    hidden_size: int

    def __post_init__(self) -> None:
        if not 1 <= len(self.layers) <= MAX_LAYERS:
            raise InvalidField("features.layers", f"{len(self.layers)} are outside 1 to {MAX_LAYERS}")

    @property
    def position_bytes(self) -> int:
        return len(self.layers) * 2 * self.hidden_size

    def positions(self, data: bytes) -> int:
        count, rest = divmod(len(data), self.position_bytes)
        if rest:
            raise InvalidField("features", f"{len(data)} bytes are not positions of {self.position_bytes}")
        return count

    def encode(self, values: NDArray[np.float32]) -> bytes:
        """Encodes values [positions, layers, hidden] in bfloat16, rounded to nearest, ties to even."""
        bits = np.ascontiguousarray(_finite(values.astype(np.float32))).view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2").tobytes()

    def decode(self, data: bytes) -> NDArray[np.float32]:
        """Decodes to values [positions, layers * hidden]. Raises InvalidField."""
        wide = np.frombuffer(data, dtype="<u2").astype(np.uint32) << 16
        return _finite(wide.view(np.float32)).reshape(self.positions(data), -1)


def _finite(values: NDArray[np.float32]) -> NDArray[np.float32]:
    return np.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0)


class FeatureInbox:
    """One request's features: verdicts' side calls `opened`, `came`, `look`; the head's device thread `take`."""

    def __init__(self, spec: FeatureSpec, context: int = DEFAULT_CONTEXT) -> None:
        self.spec, self._context = spec, context
        self.first = self.end = self.epoch = 0  # epoch: restarts after gaps
        self.seen = 0, 0  # first and end when the next step was planned
        self.handed_out = True  # by the target in use
        self._begun = False
        self._waiting: deque[tuple[int, bytes]] = deque()  # without a gap, up to `end`
        self._planned: deque[tuple[int, bytes]] = deque()

    def wanted(self, prefix_length: int) -> int:
        """Returns the first position that the reply to an opening must have."""
        return self.end if self._begun else max(0, prefix_length - 1 - self._context)

    def opened(self, start: int, data: bytes) -> None:
        self.spec.positions(data)
        self.handed_out = True
        if not self._begun or start > self.end:
            self.epoch += self._begun
            self.first = self.end = start
            self._begun = True
            self._waiting.clear()
        self.came(start, data)

    def came(self, start: int, data: bytes) -> None:
        """Takes a verdict's features; drops those known or after a gap. Raises InvalidField."""
        count = self.spec.positions(data)
        if not self._begun or not self.first <= start <= self.end < start + count:
            return
        self._waiting.append((self.end, data[(self.end - start) * self.spec.position_bytes :]))
        self.end = start + count
        while len(self._waiting) > 1 and self.end - self._waiting[0][0] > max(self._context, DEFAULT_CONTEXT):
            self._waiting.popleft()
            self.first = self._waiting[0][0]
            self.epoch += 1

    def look(self) -> int:
        """Lets the next steps use all features that came; returns `end`."""
        self.seen = self.first, self.end
        self._planned += self._waiting
        self._waiting.clear()
        return self.end

    def take(self) -> list[tuple[int, NDArray[np.float32]]]:
        """Returns newly usable features: starts, and values [positions, layers * hidden]."""
        taken = []
        while self._planned:
            start, data = self._planned.popleft()
            taken.append((start, self.spec.decode(data)))
        return taken
