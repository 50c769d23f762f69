"""A server process of ours whose model knows one part: it calls `weather`, and then says what the tool answered.

    python -m tests.openai.scripted plain|hermes|llama3|mistral|deepseek --role serve --backend toy ...

Its tokens are bytes. Its chat template knows no tools, or is of a model of that format. What follows are main.py's
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

import tests.toy
from tandem.checkpoints.locate import Checkpoint
from tandem.checkpoints.tokenizers import HuggingFaceTokenizer
from tandem.cli import main
from tandem.runners.protocol import Limits
from tests.toy import END, VOCAB_SIZE, ToyConfig, ToyRunner, ToyTokenizer

TURN = "<|im_start|>assistant\n"
CALLS = {
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{arguments}\n```"
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "mistral": '[TOOL_CALLS] [{"name": "weather", "arguments": {arguments}}]',
    "llama3": '{"name": "weather", "parameters": {arguments}}',
    "hermes": '<tool_call>\n{"name": "weather", "arguments": {arguments}}\n</tool_call>',
}
"""A call in the formats of models."""
SIGNS = {"deepseek": "<｜tool▁calls▁begin｜>", "mistral": "[TOOL_CALLS]", "llama3": "ipython", "hermes": "<tool_call>"}
"""What the prompts of these models have where there are tools."""
PLAIN = """
{%- for message in messages %}<|im_start|>{{ message.role + '\n' + message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
WITH_TOOLS = """
{%- if tools %}<|im_start|>system
After SIGN call one of
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}{% for message in messages %}<|im_start|>{{ message.role + '\n' + message.content }}
{%- for call in message.tool_calls or [] %}SIGN{{ call.function | tojson }}{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
TEMPLATES = {"plain": PLAIN, **{name: WITH_TOOLS.replace("SIGN", sign) for name, sign in SIGNS.items()}}


def answers(prompt: str) -> Iterator[str]:
    """What the model wants to say to a prompt, best first; a structure may forbid the first."""
    asked, _, after = prompt.rpartition("?")  # of the user's last question
    arguments = json.dumps({"city": ["", *re.findall(r"weather in (\w+)", asked)][-1]})
    reacts = "Action Input" in asked  # LlamaIndex's ReActAgent tells of tools by itself, in words
    if found := re.search(r"sunny in \w+", after):
        yield ("Thought: I can answer.\nAnswer: " if reacts else "") + f"It is {found[0]}."
    elif '"name": "weather"' in asked:
        name = next(name for name, sign in SIGNS.items() if sign in asked)
        yield CALLS[name].replace("{arguments}", arguments)
        yield '[{"name":"weather","arguments":' + arguments.replace(" ", "") + "}]"
    elif reacts:
        yield f"Thought: I need a tool.\nAction: weather\nAction Input: {arguments}"
    else:
        yield "I have no tools."


class Scripted(ToyRunner):
    """Goes on with the best answer that begins as its output does."""

    def logits(self, slot: int, position: int) -> Any:
        held = bytes(each for each in self._cache[slot, : position + 1].tolist() if each < 256)
        prompt, _, said = held.rpartition(TURN.encode())
        logits = np.full(VOCAB_SIZE, -1e4, dtype=np.float32)
        for place, answer in enumerate(answers(prompt.decode(errors="replace"))):
            whole = answer.encode()
            if whole.startswith(said):
                token = whole[len(said)] if said != whole else END
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

    tests.toy.toy_runner = scripted
    tests.toy.ToyBackend.tokenizer = lambda *_: tokenizer  # type: ignore[method-assign,assignment]


if __name__ == "__main__":
    install(TEMPLATES[sys.argv[1]])
    sys.exit(main.main(sys.argv[2:]))
