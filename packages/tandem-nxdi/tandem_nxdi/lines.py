"""Tracks the tokens of each KV line, and builds forward calls that keep lines correct.

NxDI's rules, kept here alone (docs/trainium-nxdi.md):
- a decode call contains every line, in order: NxDI does not sort a full batch, and its padding of a partial one
  overwrites idle lines. An idle line is fed its next position, rewritten later;
- no decode call contains position 0: all rows would become a prefill;
- a mask covers the positions before a row's window, no more;
- a window has `width` tokens: short rows are padded, and at a line's end the window slides back and writes the same
  keys and values again;
- a line's adapter is its prompt's, until the next prompt;
- a prompt has two tokens or more, unless the prediction after its first token is needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tandem_nxdi.shapes import Layout

Ids = Sequence[int]


@dataclass(frozen=True, slots=True)
class ForwardCall:
    """Rows of tokens at positions.

    `prior`: cached positions in each row's mask; in a prefill, the prompt's. `mask_length`: the mask's columns.
    `lines`: each row's KV line. `adapters`: NxDI's number for each row; 0 is none.
    """

    input_ids: tuple[tuple[int, ...], ...]
    position_ids: tuple[tuple[int, ...], ...]
    prior: tuple[int, ...]
    mask_length: int
    lines: tuple[int, ...]
    adapters: tuple[int, ...] = ()


class LineError(ValueError):
    """A row does not fit its line."""


class Lines:
    """Valid tokens of each line; tokens after them are overwritten before they are read."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.held: list[list[int]] = [[] for _ in range(layout.lines)]
        self.adapters = [0] * layout.lines

    def note(self, line: int, start: int, tokens: Ids) -> None:
        """Records `tokens`, written from `start` on."""
        self.held[line][start:] = tokens

    def check(self, line: int, start: int, count: int, adapter: int = 0) -> None:
        """Raises LineError unless `count` tokens may be fed at `start` with this adapter."""
        if start and adapter != self.adapters[line]:
            raise LineError(f"line {line} was encoded with adapter {self.adapters[line]}, and {adapter} is asked for")
        if start > len(self.held[line]):
            raise LineError(
                f"position {start} of line {line}: only {len(self.held[line])} positions before it are written"
            )
        if start + count > self.layout.capacity:
            raise LineError(f"position {start + count} of line {line} is above its {self.layout.capacity}")

    def prompt(self, line: int, tokens: Ids, room: int, adapter: int = 0) -> ForwardCall:
        """Returns a call that encodes a prompt in the bucket of `room` tokens; one token's prediction is not valid."""
        self.adapters[line] = adapter
        ids = list(tokens) if len(tokens) > 1 else [tokens[0], tokens[0]]
        natural = next(chunk for chunk in self.layout.chunks if chunk >= len(ids))
        length = len(ids) if natural == max(room, natural) else room
        missing = length - len(ids)
        positions = (*range(len(ids)), *[1] * missing)
        return ForwardCall((tuple(ids + [0] * missing),), (positions,), (len(ids),), length, (line,), (adapter,))

    def first(self, line: int, token: int, adapter: int = 0) -> ForwardCall:
        """The call that encodes a prompt of one token whose prediction is needed.

        NxDI reads the logits at the largest position, which is a pad's (position 1). We pad to the largest bucket with
        position 0: torch.max then picks the first, the token's own.
        """
        length = self.layout.chunks[-1]
        self.adapters[line] = adapter
        return ForwardCall(((token, *[0] * (length - 1)),), ((0,) * length,), (1,), length, (line,), (adapter,))

    def step(
        self, rows: Mapping[int, tuple[int, Ids]], mask_length: int | None
    ) -> tuple[ForwardCall, dict[int, slice]]:
        """A decode call of every line, and the columns of each row's tokens.

        `rows`: line to (position, tokens). `mask_length`: None for the largest. Raises LineError.
        """
        width, windows = self.layout.width, {}
        ids, starts = [], []
        for line in range(self.layout.lines):
            if line in rows:
                start, tokens = rows[line]
                begin = min(start, self.layout.capacity - self.layout.span)
                if begin < start and width == 1:
                    raise LineError(f"position {start} of line {line}: a fused step has no room for its drafts")
                fed = [*self.held[line][begin:start], *tokens]
                windows[line] = slice(start - begin, start - begin + len(tokens))
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
        lines, adapters = tuple(range(self.layout.lines)), tuple(self.adapters)
        return ForwardCall(tuple(ids), positions, tuple(starts), length, lines, adapters), windows

    def reach(self, rows: Mapping[int, tuple[int, Ids]]) -> int:
        """Positions that a decode bucket must hold: the furthest window's start and NxDI's reserve."""
        last = self.layout.capacity - self.layout.span
        begins = [rows[line][0] if line in rows else len(self.held[line]) for line in range(self.layout.lines)]
        return min(max(begins), last) + self.layout.reserved
