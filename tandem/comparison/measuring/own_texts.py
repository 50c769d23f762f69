"""Repeats prompts on plain vLLM, alone and at once: its own texts vary, which bounds any comparison with drafts."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from tandem.comparison.measuring.architectures import AUTOREGRESSIVE
from tandem.comparison.measuring.config import ComparisonConfig
from tandem.comparison.measuring.identity import first_difference
from tandem.comparison.measuring.records import Record
from tandem.comparison.measuring.run import Contender, attempt

Texts = Mapping[str, tuple[int, ...]]  # tokens by answered prompt


async def own_texts(contenders: Sequence[Contender], config: ComparisonConfig, records: Sequence[Record]) -> str | None:
    """Returns the report's remark; None without plain decoding or with sampling."""
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
        f"vLLM's plain server against its own texts: asked for each prompt again, {compared(alone, again)};"
        f" asked for all of them at once, {compared(alone, together)}."
    )


def compared(truth: Texts, texts: Texts) -> str:
    """Counts equal and missing texts, and locates the first difference."""
    differing = {
        name: at for name, tokens in texts.items() if (at := first_difference(truth[name], tokens)) is not None
    }
    same = f"{len(texts) - len(differing)} of {len(texts)} are the same"
    if differing:
        name = min(differing, key=lambda each: differing[each])
        same += f" (the earliest difference: token {differing[name]} of {name})"
    failed = len(truth) - len(texts)
    return same + (f", and {failed} failed" if failed else "")


def _texts(records: Sequence[Record]) -> dict[str, tuple[int, ...]]:
    return {record.prompt: record.measurement.output_token_ids for record in records if record.measurement}
