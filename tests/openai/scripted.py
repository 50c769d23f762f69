"""A server process of ours whose model knows one part: it calls `weather`, and then says what the tool answered.

    python -m tests.openai.scripted plain|hermes --role serve --backend toy ...

Its tokens are bytes. Its chat template is plain, or tells it of tools as Qwen's does. What follows are main.py's
arguments. A model that is small enough for tests does not decide to call a tool, so that no agent's loop would run with
it; all but the model's choice of tokens is the product.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import tandem.runners.toy
from tandem.checkpoints.locate import Checkpoint
from tandem.checkpoints.tokenizers import HuggingFaceTokenizer
from tandem.cli import main
from tandem.runners.protocol import Limits
from tandem.runners.toy import END, VOCAB_SIZE, ToyConfig, ToyRunner, ToyTokenizer

TURN = "<|im_start|>assistant\n"
GENERATION = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
TEMPLATES = {
    "plain": """
{%- for message in messages %}<|im_start|>{{ message.role + '\n' + message.content }}<|im_end|>
{% endfor %}"""
    + GENERATION,
    "hermes": """
{%- if tools %}<|im_start|>system
Call with <tool_call>{"name": ..., "arguments": ...}</tool_call> one of
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}{% for message in messages %}<|im_start|>
{%- if message.role == 'tool' %}user
<tool_response>{{ message.content }}</tool_response>
{%- else %}{{ message.role + '\n' + message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}
{%- endif %}<|im_end|>
{% endfor %}"""
    + GENERATION,
}


def answers(prompt: str) -> Iterator[str]:
    """What the model wants to say to a prompt, best first; a structure may forbid the first."""
    asked, _, after = prompt.rpartition("?")  # of the user's last question
    call = {"name": "weather", "arguments": {"city": ["", *re.findall(r"weather in (\w+)", asked)][-1]}}
    reacts = "Action Input" in asked  # LlamaIndex's ReActAgent tells of tools by itself, in words
    if found := re.search(r"sunny in \w+", after):
        yield ("Thought: I can answer.\nAnswer: " if reacts else "") + f"It is {found[0]}."
    elif '"name": "weather"' in asked:
        yield f"<tool_call>\n{json.dumps(call)}\n</tool_call>"
        yield json.dumps([call], separators=(",", ":"))
    elif reacts:
        yield f"Thought: I need a tool.\nAction: weather\nAction Input: {json.dumps(call['arguments'])}"
    else:
        yield "I have no tools."


class Scripted(ToyRunner):
    """Goes on with the best answer that begins as its output does."""

    def logits(self, slot: int, position: int) -> Any:
        held = bytes(each for each in self._cache[slot, : position + 1].tolist() if each < 256).decode(errors="replace")
        prompt, _, said = held.rpartition(TURN)
        logits = np.full(VOCAB_SIZE, -1e4, dtype=np.float32)
        for place, answer in enumerate(answers(prompt)):
            if answer.startswith(said):
                token = answer[len(said) :].encode()[0] if said != answer else END
                logits[token] = max(logits[token], -100.0 * place)
        return logits


def install(template: str) -> None:
    """Toy models are scripted from now on, and have this chat template."""
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "chat_template": template}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "tokenizer.json").write_bytes(ToyTokenizer().files()["tokenizer.json"])
        (Path(folder) / "tokenizer_config.json").write_text(json.dumps(settings))
        tokenizer = HuggingFaceTokenizer(Checkpoint("scripted", folder))

    def scripted(limits: Limits, config: ToyConfig) -> ToyRunner:
        return Scripted(limits, config)

    tandem.runners.toy.toy_runner = scripted
    tandem.runners.toy.ToyBackend.tokenizer = lambda *_: tokenizer  # type: ignore[method-assign,assignment]


if __name__ == "__main__":
    install(TEMPLATES[sys.argv[1]])
    sys.exit(main.main(sys.argv[2:]))
