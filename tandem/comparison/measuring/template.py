"""Decides whether own prompts are put into the model's chat template where that was left to the model.

An Instruct model that gets a question as it is often ends at once. The server knows its template, so it is asked.
"""

from __future__ import annotations

from dataclasses import replace

from tandem.comparison.measuring.config import ComparisonConfig
from tandem.comparison.measuring.record_log import RecordLog
from tandem.comparison.measuring.records import failure_of
from tandem.comparison.measuring.run import Contender, measure


async def decide_template(log: RecordLog, contender: Contender) -> ComparisonConfig:
    """Returns the configuration with every prompt decided, and logs the decision: in the template if there is one."""
    config = log.measured.config
    if all(prompt.chat is not None for prompt in config.prompts):
        return config
    log.template(await _has_template(contender, config))
    return log.measured.config


async def _has_template(contender: Contender, config: ComparisonConfig) -> bool:
    """Asks for one token of a prompt in the template. Servers refuse that without one; they name the field."""
    prompt = next(prompt for prompt in config.prompts if prompt.chat is None)
    request = replace(prompt.into(config.conditions[0].request), chat=True, max_new_tokens=1)
    try:
        await measure(contender, request)
    except Exception as error:  # that of a server that is broken shows in the measured requests as well
        return not failure_of(error).message.startswith("chat: ")
    return True
