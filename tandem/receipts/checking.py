"""Checks a receipt without its model."""

from __future__ import annotations

import enum
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from tandem.receipts.keys import PublishedKey, signature_right
from tandem.receipts.receipt import Receipt, Signed
from tandem.speculation.stopping import Stopping, TextStream
from tandem.speculation.types import FinishReason


class CheckOutcome(enum.IntEnum):
    """Exit codes of `tandem check`, worst first; 1 and 2 are those of all commands."""

    RIGHT = 0
    FORGED = 3
    OTHER_WEIGHTS = 4
    CANNOT_CHECK = 5


@dataclass(frozen=True, slots=True)
class Finding:
    """A row of the table. `outcome` None: unchecked."""

    what: str
    outcome: CheckOutcome | None
    note: str = ""

    @property
    def word(self) -> str:
        return "not checked" if self.outcome is None else self.outcome.name.lower().replace("_", " ")


def overall(findings: Sequence[Finding]) -> CheckOutcome:
    outcomes = {finding.outcome for finding in findings}
    return next(
        (each for each in (*list(CheckOutcome)[1:], CheckOutcome.RIGHT) if each in outcomes), CheckOutcome.CANNOT_CHECK
    )


def signature(signed: Signed, trusted: Collection[PublishedKey] | None) -> list[Finding]:
    """Checks the signature and its key; `trusted` None: any key. Raises InvalidField."""
    key = signed.receipt.key
    if not signature_right(signed):
        return [Finding("signature", CheckOutcome.FORGED, "not of the key that the receipt names")]
    found = [Finding("signature", CheckOutcome.RIGHT, key)]
    if trusted is None:
        return [*found, Finding("key", None, "whose it is: give the server's with --keys")]
    if key not in {each.key for each in trusted}:
        return [*found, Finding("key", CheckOutcome.FORGED, "not one of those in --keys")]
    return [*found, Finding("key", CheckOutcome.RIGHT, "one of those in --keys")]


def digests(receipt: Receipt) -> Finding:
    if receipt.chained():
        return Finding("digests", CheckOutcome.RIGHT, f"{len(receipt.digests)} of {len(receipt.token_ids)} prefixes")
    return Finding("digests", CheckOutcome.FORGED, "not those of the tokens")


def prompt(signed: Signed, candidates: Sequence[Sequence[int]]) -> tuple[Finding, tuple[int, ...] | None]:
    """Finds the `candidates` entry that is the prompt; returns its tokens."""
    for tokens in candidates:
        if signed.receipt.of_prompt(signed.salt, tokens):
            return Finding("prompt", CheckOutcome.RIGHT, f"{len(tokens)} tokens"), tuple(tokens)
    return Finding("prompt", CheckOutcome.FORGED, "the receipt is of another prompt, or its salt was changed"), None


def end(receipt: Receipt, text: TextStream | None) -> Finding:
    """Checks the output's end; `text` None: stop strings are unchecked."""
    request = receipt.request
    if text is None and (request.stop_strings or receipt.finish_reason is FinishReason.STOP_STRING):
        return Finding("end", None, "stop strings need the model's tokenizer")
    stopping = Stopping(
        text or TextStream(),
        request.max_new_tokens,
        frozenset(request.end_of_sequence_ids),
        frozenset(request.stop_token_ids),
        request.stop_strings,
    )
    stopping.push(receipt.token_ids)
    if stopping.reason is receipt.finish_reason and stopping.emitted == len(receipt.token_ids):
        return Finding("end", CheckOutcome.RIGHT, receipt.finish_reason.name.lower())
    said = stopping.reason.name.lower() if stopping.reason else "nothing"
    note = f"{receipt.finish_reason.name.lower()} is claimed after {len(receipt.token_ids)} tokens"
    return Finding("end", CheckOutcome.FORGED, f"{note}, but {said} ends them after {stopping.emitted}")
