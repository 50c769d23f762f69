"""Follows the output of a request through its structure, in a process of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import numpy as np

from tandem.engine.structure_process import LIMITS, Died, Refused, StructureProcess, refusal
from tandem.engine.structure_worker import ADVANCE, MASK
from tandem.speculation.draws import BadLogits, StructureFailed
from tandem.speculation.processing import Mask
from tandem.speculation.sampling import Structure

TRIES = 2
"""Attempts at work whose process ends without having exceeded a limit."""


class RemoteMatcher:
    """A Matcher in a process of its own, forked from `compiled`. One thread at a time may use it.

    As soon as a token turns out to be allowed, it is taken for the next one, and the mask after it is asked for: it is
    made while the model computes. If the process is killed from outside, another takes its place. If it reaches a
    limit, or can follow no further, that is final.
    """

    def __init__(self, structure: Structure, compiled: StructureProcess, vocab_size: int) -> None:
        self._structure, self._compiled, self._vocab_size = structure, compiled, vocab_size
        self._process = compiled.fork()
        self._tokens: list[int] = []
        self._there: list[int] = []  # the tokens that the process has taken
        self._same = 0  # how many of those are still the output's
        self._asked = False  # an answer is due: the mask after all tokens that are there
        self._looks_ahead = True
        self._packed = b""  # the mask, a bit for each token, if it is known
        self._mask: Mask | None = None
        self._failed = ""

    async def take(self, tokens: Sequence[int]) -> int:
        """Takes tokens, as long as they match, of an output that has none; returns how many. Raises Refused or Died."""
        taken = await self._process.take(tokens) if tokens else 0
        self._tokens, self._there, self._same = list(tokens[:taken]), list(tokens[:taken]), taken
        return taken

    def mask(self) -> Mask:
        if self._mask is None:
            packed = np.frombuffer(self._bits(), dtype=np.uint8)
            self._mask = np.unpackbits(packed, count=self._vocab_size, bitorder="little").view(np.bool_)
        return self._mask

    def allows(self, token: int) -> bool:
        if not _has(self._bits(), token):
            return False
        if self._looks_ahead and not self._asked and self._same == len(self._there) == len(self._tokens):
            with contextlib.suppress(Refused, Died):
                self._process.ask(MASK, 0, (token,))
            self._there.append(token)
            self._asked = True
        return True

    def advance(self, token: int) -> bool:
        sure = _has(self._packed, token)
        if not sure and not self._ask(ADVANCE, token)[0]:
            return False
        at = len(self._tokens)
        self._tokens.append(token)
        if not sure:
            self._there.append(token)
        if self._same == at and self._there[at:] == [token]:
            self._same += 1
        self._packed, self._mask = b"", None
        return True

    def back(self, count: int) -> None:
        if count:
            del self._tokens[-count:]
            self._same = min(self._same, len(self._tokens))
            self._packed, self._mask = b"", None

    def _bits(self) -> bytes:
        if not self._packed:
            self._packed = bytes(self._ask(MASK))
        return self._packed

    def _ask(self, asked: int, token: int = 0) -> memoryview:
        """Brings the process to where the output is, and asks it. Raises StructureFailed, or another BadLogits."""
        for _ in range(TRIES):
            if self._failed:
                break
            wanted = asked == MASK and self._same == len(self._there) == len(self._tokens)
            try:
                if not (self._asked and wanted):
                    self._drop_answer()
                    self._process.ask(asked, len(self._there) - self._same, self._tokens[self._same :], token)
                    self._there[self._same :] = self._tokens[self._same :]
                    self._same = len(self._there)
                self._asked = False
                return self._process.answer()
            except (Refused, Died) as error:
                if isinstance(error, Refused) or error.signal in LIMITS:
                    self._failed = refusal(self._structure, error, "follow").fault
                else:
                    self._again()
        if self._failed:
            raise StructureFailed(self._failed)
        raise BadLogits("the processes that follow the structure were killed")

    def _drop_answer(self) -> None:
        """Reads the answer that is due and not wanted. That the process has failed there does not count."""
        if self._asked:
            self._asked = False
            try:
                self._process.answer()
            except (Refused, Died):
                self._looks_ahead = False  # what costs much is asked for only where it is needed
                self._again()

    def _again(self) -> None:
        """Begins again in another process, if there can be one."""
        self._process.close()
        self._there, self._same, self._asked = [], 0, False
        with contextlib.suppress(Died):
            self._process = self._compiled.fork()


def _has(bits: bytes, token: int) -> bool:
    """Whether a token is in a mask that has a bit for each; the mask may be empty."""
    return token < 8 * len(bits) and bool(bits[token // 8] >> token % 8 & 1)
