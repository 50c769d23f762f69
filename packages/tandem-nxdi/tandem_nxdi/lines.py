"""Tracks on the host which tokens each KV line holds, and builds the forward calls that keep lines correct.

This module alone keeps NxDI's rules (docs/trainium-nxdi.md):
- a decode call contains every line, in order: NxDI does not sort a full batch, and the rows that it adds to a partial
  one overwrite the lines of idle sequences. An idle line is fed its own next position, which is rewritten later;
- no decode call contains position 0: it would turn all rows into a prefill;
- a mask covers the positions before a row's window and nothing else;
- a window always has `width` tokens: short rows are padded at the end, and at a line's end the window slides back over
  tokens that the line already holds, and writes the same keys and values again;
- the adapter of a line is the one that its prompt was encoded with, and changes with the next prompt;
- a prompt has at least two tokens, unless the prediction after its first token is needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tandem_nxdi.build import Layout

Ids = Sequence[int]


@dataclass(frozen=True, slots=True)
class ForwardCall:
    """One forward call: rows of tokens at positions.

    `prior`: cached positions that each row's mask shows; in a prefill, the prompt's own. `mask_length`: columns of the
    mask. `lines`: each row's KV line. `adapters`: what NxDI calls the adapter of each row's line; 0 for none.
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
    """The tokens that each line validly holds; anything written beyond them is overwritten before it is read."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.held: list[list[int]] = [[] for _ in range(layout.lines)]
        self.adapters = [0] * layout.lines

    def note(self, line: int, start: int, tokens: Ids) -> None:
        """Records that `tokens` were written at `start`, start+1, ..."""
        self.held[line][start:] = tokens

    def check(self, line: int, start: int, count: int, adapter: int = 0) -> None:
        """Raises LineError unless `count` tokens may be fed at `start`, with this adapter."""
        if start and adapter != self.adapters[line]:
            raise LineError(f"line {line} was encoded with adapter {self.adapters[line]}, and {adapter} is asked for")
        if start > len(self.held[line]):
            raise LineError(
                f"position {start} of line {line}: only {len(self.held[line])} positions before it are written"
            )
        if start + count > self.layout.capacity:
            raise LineError(f"position {start + count} of line {line} is above its {self.layout.capacity}")

    def prompt(self, line: int, tokens: Ids, room: int, adapter: int = 0) -> ForwardCall:
        """The call that encodes a whole prompt, in the bucket that holds `room` tokens.

        It writes the prompt's KV; its prediction is valid only for prompts of two or more tokens.
        """
        self.adapters[line] = adapter
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
            (adapter,),
        )

    def first(self, line: int, token: int, adapter: int = 0) -> ForwardCall:
        """The call that encodes a prompt of one token whose prediction is needed.

        NxDI takes the logits at the largest position and pads with position 1, so it would read those of a pad. We pad
        to the largest bucket with position 0 instead: torch.max then picks the first, which is the token's own.
        """
        length = self.layout.chunks[-1]
        self.adapters[line] = adapter
        return ForwardCall(((token, *[0] * (length - 1)),), ((0,) * length,), (1,), length, (line,), (adapter,))

    def step(
        self, rows: Mapping[int, tuple[int, Ids]], mask_length: int | None
    ) -> tuple[ForwardCall, dict[int, slice]]:
        """A decode call of every line, and the columns of each row's tokens in it.

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
        """Positions that a decode bucket must hold: the furthest start of a window plus what NxDI reserves."""
        last = self.layout.capacity - self.layout.span
        begins = [rows[line][0] if line in rows else len(self.held[line]) for line in range(self.layout.lines)]
        return min(max(begins), last) + self.layout.reserved
