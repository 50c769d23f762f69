"""A host's picture of the KV lines, and the calls that keep them right.

NxDI's rules (docs/trainium-nxdi.md) that are kept here and nowhere else:
- every decode call holds every line, in order: a full batch is not sorted by NxDI, and the rows that it adds to a
  partial one overwrite the lines of idle sequences. An idle line is fed its own next position, to be rewritten later;
- no position 0 in a decode call: one would make a prefill of all rows;
- a mask covers what comes before a row's window and nothing else;
- a window is always `width` tokens: short rows are padded behind, and at a line's end the window slides back over
  tokens that the line holds already, whose keys and values it only writes again;
- a prompt has two tokens at least, unless the prediction after its first is wanted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tandem.runners.nxdi.build import Layout

Ids = Sequence[int]


@dataclass(frozen=True, slots=True)
class ForwardCall:
    """One forward call: rows of tokens at positions. `prior`: how many cached positions each row's mask shows.

    `mask_length` columns; in a prefill the mask shows the prompt itself.
    """

    input_ids: tuple[tuple[int, ...], ...]
    position_ids: tuple[tuple[int, ...], ...]
    prior: tuple[int, ...]
    mask_length: int
    lines: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Window:
    """A row's place in a call: its tokens begin at `column`."""

    column: int
    count: int


class LineError(ValueError):
    """A row that does not fit its line."""


class Lines:
    """Which tokens each line holds, as far as we know; what was written past them is overwritten before it is seen."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.held: list[list[int]] = [[] for _ in range(layout.lines)]

    def note(self, line: int, start: int, tokens: Ids) -> None:
        """`tokens` are at `start`, start+1, ... now."""
        self.held[line][start:] = tokens

    def check(self, line: int, start: int, count: int) -> None:
        """Raises LineError unless `count` tokens may be fed at `start`."""
        if start > len(self.held[line]):
            raise LineError(
                f"position {start} of line {line}: only {len(self.held[line])} positions before it are written"
            )
        if start + count > self.layout.capacity:
            raise LineError(f"position {start + count} of line {line} is above its {self.layout.capacity}")

    def prompt(self, line: int, tokens: Ids, room: int) -> ForwardCall:
        """A whole prompt by context encoding, in the bucket that holds `room` tokens; only its KV is wanted, or the
        prediction after it if it has two tokens or more."""
        ids = list(tokens) if len(tokens) > 1 else [tokens[0], tokens[0]]
        natural = next(chunk for chunk in self.layout.chunks if chunk >= len(ids))
        length = len(ids) if natural == max(room, natural) else room
        missing = length - len(ids)
        return ForwardCall(
            (tuple(ids + [0] * missing),),
            ((*range(len(ids)), *[1] * missing),),
            (len(ids),),
            length,
            (line,),
        )

    def first(self, line: int, token: int) -> ForwardCall:
        """A prompt of one token whose prediction is wanted.

        NxDI takes logits where the position is largest, and pads with position 1, so it would read a pad's. Padded by
        us to the largest bucket with position 0, the first of equals is the token's own (torch.max).
        """
        length = self.layout.chunks[-1]
        return ForwardCall(((token, *[0] * (length - 1)),), ((0,) * length,), (1,), length, (line,))

    def step(
        self, rows: Mapping[int, tuple[int, Ids]], mask_length: int | None
    ) -> tuple[ForwardCall, dict[int, Window]]:
        """A decode call of every line; `rows`: line to (position, tokens). And where each row's tokens are in it."""
        width, windows = self.layout.width, {}
        ids, starts = [], []
        for line in range(self.layout.lines):
            if line in rows:
                start, tokens = rows[line]
                begin = min(start, self.layout.capacity - self.layout.span)
                if begin < start and width == 1:
                    raise LineError(f"position {start} of line {line}: a fused step has no room for its drafts")
                fed = [*self.held[line][begin:start], *tokens]
                windows[line] = Window(start - begin, len(tokens))
            else:
                begin = max(1, min(len(self.held[line]), self.layout.capacity - self.layout.span))
                fed = self.held[line][begin : begin + width]
            if begin < 1:
                raise LineError(f"position {begin} of line {line}: only context encoding starts a line")
            ids.append((*fed, *[fed[-1] if fed else 0] * (width - len(fed))))
            starts.append(begin)
        most = self.layout.capacity - self.layout.reserved
        length = most if mask_length is None else mask_length - self.layout.reserved
        positions = tuple(tuple(range(start, start + width)) for start in starts)
        return ForwardCall(tuple(ids), positions, tuple(starts), length, tuple(range(self.layout.lines))), windows

    def reach(self, rows: Mapping[int, tuple[int, Ids]]) -> int:
        """What a decode bucket must hold: the furthest begin of any line's window, and what NxDI reserves."""
        last = self.layout.capacity - self.layout.span
        begins = [rows[line][0] if line in rows else len(self.held[line]) for line in range(self.layout.lines)]
        return min(max(begins), last) + self.layout.reserved
