"""Redraws a receipt's tokens: its target verifies the output as a draft."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tandem.engine.engine import Engine
from tandem.engine.generators import widest_step
from tandem.engine.sequences import TargetSequence
from tandem.receipts.checking import CheckOutcome, Finding
from tandem.receipts.computation_receipt import sampled_spans
from tandem.receipts.receipt import EVERY, Receipt, SignedModel
from tandem.runners.protocol import VerifyRow
from tandem.speculation.draws import Floats, gumbel, surviving, words
from tandem.speculation.rejection import Logits
from tandem.speculation.types import ModelInfo, Request, SamplingParams, TokenLogprobs


@dataclass(slots=True)
class Redrawn:
    """`gaps`: logits between each token that was not redrawn and the best."""

    tokens: int = 0
    wrong: int = 0
    first: tuple[int, int, int] | None = None
    gaps: list[float] | None = None
    logprobs: int = 0
    logprobs_wrong: int = 0
    logprobs_off: float = 0.0


def same_model(receipt: Receipt, info: ModelInfo) -> Finding:
    own = SignedModel.from_info(info)
    for name in ("weights_revision", "dtype", "tokenizer_sha256", "vocab_size"):
        there, here = getattr(receipt.model, name), getattr(own, name)
        if there != here:
            return Finding("weights", CheckOutcome.OTHER_WEIGHTS, f"{name} is {there} in the receipt, and {here} here")
    return Finding("weights", CheckOutcome.RIGHT, f"{own.name}, {own.dtype}, {own.weights_revision[:24]}")


def same_adapter(receipt: Receipt, engine: Engine) -> Finding | None:
    if receipt.adapter is None:
        return None
    name, revision = receipt.adapter
    here = engine.adapters.revisions.get(name)
    if here is None:
        return Finding("adapter", CheckOutcome.CANNOT_CHECK, f"{name} is not here: give --adapters {name}=DIR")
    if here != revision:
        note = f"the revision of {name} is {revision[:24]} in the receipt, and {here[:24]} here"
        return Finding("adapter", CheckOutcome.OTHER_WEIGHTS, note)
    return Finding("adapter", CheckOutcome.RIGHT, f"{name}, {revision[:24]}")


def same_arithmetic(receipt: Receipt, engine: Engine) -> bool:
    """Whether logits have the same bits: then a wrong token is a forgery."""
    there = {receipt.served.arithmetic, *(each.arithmetic for each in receipt.served.verifiers)}
    exact = receipt.served.bit_exact and engine.runner.shapes.bit_exact
    return exact and bool(engine.arithmetic) and there == {engine.arithmetic}


def spans(receipt: Receipt, sample: int | None, beacon: bytes | None = None) -> list[range]:
    """Returns all spans, or a `sample` that a beacon chooses, or that nobody can predict."""
    count = len(receipt.token_ids)
    found = [range(start, min(start + EVERY, count)) for start in range(0, count, EVERY)]
    if sample is None or sample >= len(found):
        return found
    if beacon is None:
        return sorted(random.SystemRandom().sample(found, sample), key=lambda span: span.start)
    return [found[index] for index in sampled_spans(receipt, sample, beacon)]


async def redraw(
    receipt: Receipt, engine: Engine, prompt: Sequence[int], checked: Sequence[range], exact: bool
) -> Redrawn:
    """Redraws spans; `exact` ends at the first wrong token, otherwise gaps are computed. Raises InvalidField."""
    signed, found = receipt.request, Redrawn(gaps=None if exact else [])
    adapter = receipt.adapter[0] if receipt.adapter else ""
    request = Request(signed.sampling, logprobs=signed.logprobs, adapter=adapter)
    sequence = await TargetSequence.admitted(engine, request, len(prompt))
    try:
        sequence.processing = await engine.processing(request, len(prompt))
        tokens = (*prompt, *receipt.token_ids)
        most = widest_step(engine)
        for span in checked:
            at = span.start
            while at < span.stop:
                end = min(span.stop, at + most)
                start = len(prompt) + at
                draft = tokens[start : len(prompt) + end - 1]
                verdict = await sequence.verify(tokens[:start], draft)
                drawn = verdict.token_ids
                right = verdict.accepted + (drawn[-1] == tokens[start + verdict.accepted])
                found.tokens += right
                if receipt.logprobs:
                    _compare(found, receipt.logprobs[at : at + right], verdict.logprobs)
                at += right
                if right < len(drawn):
                    found.tokens += 1
                    found.wrong += 1
                    found.first = found.first or (at, tokens[len(prompt) + at], drawn[-1])
                    if found.gaps is None:
                        return found
                    gap = await _gap(sequence, tokens[: len(prompt) + at], tokens[len(prompt) + at])
                    found.gaps.append(gap)
                    at += 1
    finally:
        sequence.close()
    return found


def _compare(found: Redrawn, there: Sequence[TokenLogprobs], here: Sequence[TokenLogprobs]) -> None:
    for one, other in zip(there, here, strict=False):
        found.logprobs += 1
        if one != other:
            found.logprobs_wrong += 1
            off = [abs(a - b) for (_, a), (_, b) in zip(one.top, other.top, strict=False)]
            found.logprobs_off = max(found.logprobs_off, abs(one.logprob - other.logprob), *off)


async def _gap(sequence: TargetSequence, tokens: Sequence[int], token: int) -> float:
    # Infinite without logits.
    runner: Any = sequence.engine.runner
    if not hasattr(runner, "verify_logits"):
        return float("inf")
    processor, position = sequence.processor(tokens), len(tokens) - 1
    row = VerifyRow(
        sequence.slot, position, tokens[-1], (), sequence.request, processor=processor, adapter=sequence.adapter
    )

    def logits() -> Logits:
        found = runner.verify_logits([row])[0]
        raw = np.asarray(found.float().cpu() if hasattr(found, "cpu") else found, dtype=np.float32).reshape(-1)
        return raw if processor is None else processor.logits(raw, ())

    return shortfall(await sequence.engine.batcher.on_device(logits), sequence.request.sampling, len(tokens), token)


def shortfall(logits: Logits, params: SamplingParams, position: int, token: int) -> float:
    """Returns how much a logit must rise for `token` to be drawn; 0: drawn."""
    if params.greedy:
        return float(logits.max() - logits[token])
    scores: Floats = (logits.astype(np.float64) - float(logits.max())) / params.temperature
    kept = surviving(scores, params)
    ids = np.arange(len(scores)) if kept is None else kept
    noisy = scores + gumbel(words(params.seed, position, len(scores)))
    gap = float(noisy[ids].max() - noisy[token])
    if token not in ids:
        gap = max(gap, float(scores[ids].min() - scores[token]))
    return max(0.0, gap) * params.temperature
