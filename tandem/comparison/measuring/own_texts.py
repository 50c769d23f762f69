"""Repeats prompts on plain vLLM, alone and at once: its own texts vary, which bounds any comparison with drafts."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence

from tandem.comparison.measuring.architectures import AUTOREGRESSIVE
from tandem.comparison.measuring.config import ComparisonConfig
from tandem.comparison.measuring.identity import first_difference
from tandem.comparison.measuring.records import Record
from tandem.comparison.measuring.run import Contender, attempt

Texts = Mapping[str, tuple[int, ...]]  # tokens by answered prompt


async def own_texts(contenders: Sequence[Contender], config: ComparisonConfig, records: Sequence[Record]) -> str | None:
    """Returns the report's remark; None without plain decoding or with sampling."""
    plain = next((contender for contender in contenders if contender.name == AUTOREGRESSIVE.name), None)
    base = config.conditions[0]
    alone = _texts(r for r in records if (r.architecture, r.run, r.condition) == (AUTOREGRESSIVE.name, 0, base.name))
    if not (plain and alone and base.request.sampling.greedy):
        return None
    prompts = [prompt for prompt in config.prompts if prompt.name in alone]
    repeated = [
        attempt(
            plain.apart(),
            Record(plain.name, prompt.name, prompt.kind, 0, condition="own texts"),
            prompt.into(base.request),
            alone=False,
        )
        for prompt in (*prompts, *prompts)
    ]
    again = _texts([await each for each in repeated[: len(prompts)]])
    together = _texts(await asyncio.gather(*repeated[len(prompts) :]))
    return (
        f"vLLM's plain server against its own texts: asked for each prompt again, {compared(alone, again)};"
        f" asked for all of them at once, {compared(alone, together)}."
    )


def compared(truth: Texts, texts: Texts) -> str:
    """Counts equal and missing texts, and locates the first difference."""
    found = ((first_difference(truth[name], tokens), name) for name, tokens in texts.items())
    differing = [(at, name) for at, name in found if at is not None]
    same = f"{len(texts) - len(differing)} of {len(texts)} are the same"
    if differing:
        at, name = min(differing)
        same += f" (the earliest difference: token {at} of {name})"
    failed = len(truth) - len(texts)
    return same + (f", and {failed} failed" if failed else "")


def _texts(records: Iterable[Record]) -> dict[str, tuple[int, ...]]:
    return {record.prompt: record.measurement.output_token_ids for record in records if record.measurement}
