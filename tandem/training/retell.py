"""Converts training data of another model to the target's tokens, for a first stage of training.

    python -m tandem.training.retell --data DIR --said_by MODEL --target_model T --output DIR2

A large target generates few tokens per second on a CPU, and an untrained draft needs many of them to learn what lists,
code and chat look like. Data of a small model (`generate`) teaches that; `train --start` then continues with data of
the target itself. The shards hold only text, no distributions, since those of another vocabulary cannot be converted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from tandem.checkpoints.gguf_cache import unpacked
from tandem.checkpoints.locate import find, weights_revision
from tandem.training.shards import Answered, ShardFolder, join, split

_MARK = "\u241f"


class Teller:
    """Converts between text and tokens with a tokenizer and its chat template."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        template = tokenizer.chat_template and self._chat(_MARK).split(_MARK)
        self._around: tuple[str, str] | None = (template[0], template[1]) if template else None
        self._end: int | None = tokenizer.eos_token_id

    def _chat(self, text: str) -> str:
        turn = [{"role": "user", "content": text}]
        return str(self._tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True))

    def read(self, prompt: Iterable[int], answer: Iterable[int]) -> tuple[str, bool, str, bool] | None:
        """Returns (prompt, whether it is a chat, answer, whether it ended).

        None if the prompt was cut in its template.
        """
        answer = list(answer)
        ended = bool(answer) and answer[-1] == self._end
        said = self._text(answer[:-1] if ended else answer)
        asked = self._text(prompt)
        if self._around and asked.startswith(self._around[0]) and asked.endswith(self._around[1]):
            return asked[len(self._around[0]) : len(asked) - len(self._around[1])], True, said, ended
        if self._around and asked.endswith(self._around[1]):
            return None
        return self._tokenizer.decode(list(prompt), skip_special_tokens=True), False, said, ended

    def _text(self, ids: Iterable[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def tell(self, asked: str, chat: bool, said: str, ended: bool) -> tuple[list[int], list[int]]:
        """Returns (prompt, answer) as this tokenizer's ids. They are cut where a token would span both."""
        special = not (chat and self._around)
        begun = asked if special else self._chat(asked)
        prompt = self._ids(begun, special)
        whole = self._ids(begun + said, special)
        same = next((i for i, (a, b) in enumerate(zip(prompt, whole, strict=False)) if a != b), len(prompt))
        end = [self._end] if ended and self._end is not None else []
        return whole[:same], [*whole[same:], *end]

    def _ids(self, text: str, special: bool) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=special)["input_ids"])


def retold(one: Answered, by: Teller, to: Teller) -> Answered | None:
    """Returns the same sequence in other tokens, or None if no answer is left to learn from."""
    read = by.read(one.prompt.tolist(), one.answer.tolist())
    if read is None:
        return None
    prompt, answer = to.tell(*read)
    if not prompt or not answer:
        return None
    ids = np.array(answer, np.int32)
    sure = np.zeros((len(ids), 1), np.float16)
    return Answered(one.kind, one.temperature, np.array(prompt, np.int32), ids, ids[:, None], sure)


def retell(data: Path, said_by: str | None, target: str | None, output: Path, show: Callable[[str], None]) -> int:
    """Converts every shard of `data`.

    Returns the number of answered tokens. Raises ValueError with a one-line message.
    """
    from transformers import AutoTokenizer

    speaker, listener = unpacked(find(said_by)), unpacked(find(target))
    theirs, folder = ShardFolder(data), ShardFolder(output)
    if theirs.meta()["target"] != weights_revision(speaker):
        raise ValueError(f"{data}: was said by {theirs.meta()['target']}, not {weights_revision(speaker)}")
    folder.claim({"target": weights_revision(listener), "said_by": weights_revision(speaker)})
    by, to = (Teller(AutoTokenizer.from_pretrained(**model.source)) for model in (speaker, listener))
    total = 0
    for number in theirs.numbers():
        again = [new for old in split(theirs.read(number)) if (new := retold(old, by, to))]
        if again:
            shard = join(again)
            folder.write(number, shard)
            total += shard.answered
            show(f"shard {number}: {shard.answered:,} tokens")
    return total


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Writes one model's training data in another's tokens.")
    parser.add_argument("--data", type=Path, required=True, help="folder that generate wrote")
    parser.add_argument("--said_by", "--said-by", help="the model that generated the data (default: the embedded one)")
    parser.add_argument(
        "--target_model", "--target-model", help="model whose tokens to write (default: the embedded one)"
    )
    parser.add_argument("--output", type=Path, required=True, help="folder for the shards")
    args = parser.parse_args(argv)
    try:
        total = retell(
            args.data, args.said_by, args.target_model, args.output, lambda line: print(line, file=sys.stderr)
        )
    except ValueError as error:
        print(f"retell: {error}", file=sys.stderr)
        return 2
    print(f"{args.output} holds {total:,} tokens")
    return 0


if __name__ == "__main__":
    sys.exit(main())
