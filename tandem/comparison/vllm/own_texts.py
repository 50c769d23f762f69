"""Asks vLLM's plain server again, alone and for all prompts at once, to see where it leaves its own text."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from tandem.comparison.measuring.architectures import AUTOREGRESSIVE
from tandem.comparison.measuring.config import ComparisonConfig
from tandem.comparison.measuring.records import Record
from tandem.comparison.measuring.run import Contender, attempt

Texts = Mapping[str, tuple[int, ...]]
"""The tokens of each prompt that was answered."""


async def own_texts(contenders: Sequence[Contender], config: ComparisonConfig, records: Sequence[Record]) -> str | None:
    """Returns what the report says of it; None where plain decoding is not measured, or tokens are drawn.

    Texts with drafts cannot be expected to be plain vLLM's more often than its own are. No time is taken of these
    requests.
    """
    plain = [contender for contender in contenders if contender.name == AUTOREGRESSIVE.name]
    base = config.conditions[0]
    measured = [record for record in records if record.architecture == AUTOREGRESSIVE.name and record.run == 0]
    alone = _texts([record for record in measured if record.condition == base.name])
    if not (plain and alone and base.request.sampling.greedy):
        return None

    async def ask(name: str) -> Record:
        prompt = next(each for each in config.prompts if each.name == name)
        record = Record(AUTOREGRESSIVE.name, prompt.name, prompt.kind, 0, condition="own texts")
        return await attempt(plain[0].apart(), record, prompt.into(base.request), alone=False)

    again = _texts([await ask(name) for name in alone])
    together = _texts(await asyncio.gather(*(ask(name) for name in alone)))
    return (
        f"vLLM's plain server against its own texts, in {config.dtype}: asked for each prompt again, "
        f"{compared(alone, again)}; asked for all of them at once, {compared(alone, together)}."
    )


def compared(truth: Texts, texts: Texts) -> str:
    """Says how many texts are the same, how many were not answered, and where the first one differs."""
    answered = [name for name in truth if name in texts]
    differing = {name: _first(truth[name], texts[name]) for name in answered if texts[name] != truth[name]}
    said = f"{len(answered) - len(differing)} of {len(answered)} are the same"
    if differing:
        name = min(differing, key=lambda each: differing[each])
        said += f" (the earliest difference: token {differing[name]} of {name})"
    failed = len(truth) - len(answered)
    return said + (f", and {failed} failed" if failed else "")


def _first(one: Sequence[int], other: Sequence[int]) -> int:
    """Returns the first position at which two texts differ, counted from 0."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def _texts(records: Sequence[Record]) -> dict[str, tuple[int, ...]]:
    return {record.prompt: record.measurement.output_token_ids for record in records if record.measurement}
