"""Converts text to token ids and back; fingerprints vocabularies so that draft and target can compare them."""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from tandem.checkpoints.byte_level import byte_characters
from tandem.checkpoints.gguf_tokenizer import gguf_parts
from tandem.checkpoints.hub_files import tokenizer_folder
from tandem.checkpoints.locate import Checkpoint, CheckpointError, first_line
from tandem.checkpoints.tokenizer_files import CONFIG, TEMPLATE, TOKENIZER, converted_parts, folder_parts
from tandem.checkpoints.tokenizer_parts import TokenizerParts
from tandem.speculation.stopping import TextStream

_BYTE = re.compile("<0x([0-9A-F]{2})>")
_SPACE = "\u2581"
_INCOMPLETE = "�"


class Tokenizer(Protocol):
    """The tokenizer interface that servers use."""

    sha256: str
    vocab_size: int  # ids are below it
    end_of_sequence_ids: tuple[int, ...]

    def encode(self, text: str, chat: bool) -> list[int]:
        """Token ids of `text`; with `chat`, of the chat template with `text` as the user's message."""

    def stream(self) -> TextStream:
        """A decoder of one sequence's tokens."""


@runtime_checkable
class ChatTokenizer(Tokenizer, Protocol):
    """What serving OpenAI clients needs besides."""

    def tokens(self, text: str, special: bool) -> list[int]:
        """Token ids of `text`; `special`: with those that begin and end every text of the model."""

    def render(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """The text of a chat, by the model's template. `options`: the template's. Raises ValueError."""

    def takes_tools(self) -> bool:
        """Whether the model's template tells the model which tools there are."""

    def text(self, tokens: Sequence[int]) -> str:
        """The text of tokens, special ones included."""

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token stands for, which need not be whole characters."""


_BYTES = {character: byte for byte, character in enumerate(byte_characters())}


class HuggingFaceTokenizer:
    """A checkpoint's tokenizer, from its tokenizer.json or its GGUF file. Raises CheckpointError."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        try:
            self._parts = _parts_of(checkpoint)
            self._backend = self._parts.backend
            vocabulary, special = self._backend.get_vocab(with_added_tokens=True), self._parts.special_ids
            self.sha256 = fingerprint(vocabulary, special)
            self.special_ids = frozenset(special)
            self.vocab_size = max(vocabulary.values(), default=-1) + 1
            end = self._parts.named.get("eos_token")
            self.end_of_sequence_ids: tuple[int, ...] = () if end is None else (int(self._backend.token_to_id(end)),)
        except Exception as error:  # parsers of missing or damaged files raise anything
            raise CheckpointError(f"{checkpoint.folder}: no usable tokenizer: {first_line(error)[:300]}") from None

    def encode(self, text: str, chat: bool) -> list[int]:
        """Like Tokenizer.encode. Raises ValueError if there is no chat template, or if it refuses the text."""
        if not chat:
            return self.tokens(text, special=True)
        return self.tokens(self.render([{"role": "user", "content": text}], add_generation_prompt=True), special=False)

    def tokens(self, text: str, special: bool) -> list[int]:
        return list(self._backend.encode(text, add_special_tokens=special).ids)

    def render(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """Like Tokenizer.render. What a template raises is about the messages that it was given."""
        if not self._parts.chat_template:
            raise ValueError("this model has no chat template")
        from tandem.checkpoints import chat_templates

        try:
            template = chat_templates.chosen(self._parts.chat_template, options.get("tools"))
            return chat_templates.render(template, messages, **{**self._parts.named, **options})
        except Exception as error:
            raise ValueError(f"the model's chat template refuses them: {first_line(error)[:300]}") from None

    def takes_tools(self) -> bool:
        return "tools" in str(self._parts.chat_template)

    def text(self, tokens: Sequence[int]) -> str:
        return str(self._backend.decode(list(tokens), skip_special_tokens=False))

    def token_bytes(self, token: int) -> bytes:
        spelt = self._backend.id_to_token(token)
        if spelt is None:
            return b""
        if token not in self.special_ids:
            if byte := _BYTE.fullmatch(spelt):
                return bytes([int(byte[1], 16)])
            if self._byte_level and all(character in _BYTES for character in spelt):
                return bytes(_BYTES[character] for character in spelt)
            if spelt.startswith(_SPACE):
                return spelt.replace(_SPACE, " ").encode()
        return self.text([token]).encode()

    @functools.cached_property
    def _byte_level(self) -> bool:
        """Whether the characters of its vocabulary stand for bytes (GPT-2's table)."""
        return "ByteLevel" in json.dumps(json.loads(self.spelling()).get("decoder"))

    def stream(self) -> TextStream:
        return IncrementalText(self._backend)

    def files(self) -> dict[str, bytes]:
        """The files, by name, that Hugging Face's libraries load this tokenizer from."""
        config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **self._parts.named}
        if self._parts.extra:
            config["extra_special_tokens"] = list(self._parts.extra)
        found = {TOKENIZER: self.spelling()}
        if isinstance(template := self._parts.chat_template, str):
            found[TEMPLATE] = template
        elif template:
            config["chat_template"] = [{"name": name, "template": each} for name, each in template.items()]
        found[CONFIG] = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
        return {name: text.encode() for name, text in sorted(found.items())}

    def spelling(self) -> str:
        """The JSON of the tokenizers library, which spells every token."""
        return str(self._backend.to_str())


class IncrementalText:
    """Decodes tokens one by one. Keeps a short tail, because a token's text can depend on those before it."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._tail: list[int] = []
        self._shown = 0

    def push(self, token: int) -> str:
        self._tail.append(token)
        text = self._decode()
        if text.endswith(_INCOMPLETE):
            return ""
        fresh = text[self._shown :]
        if len(self._tail) >= 16:
            self._tail = self._tail[-4:]
            text = self._decode()
        self._shown = len(text)
        return fresh

    def flush(self) -> str:
        fresh = self._decode()[self._shown :]
        self._tail, self._shown = [], 0
        return fresh

    def _decode(self) -> str:
        return str(self._tokenizer.decode(self._tail, skip_special_tokens=True))


def fingerprint(vocabulary: dict[str, int], special_ids: Iterable[int]) -> str:
    """SHA-256 of the vocabulary and special ids; equal if token ids mean the same."""
    content = json.dumps([sorted(vocabulary.items()), sorted(special_ids)], ensure_ascii=True)
    return hashlib.sha256(content.encode()).hexdigest()


def write_tokenizer(checkpoint: Checkpoint, folder: Path) -> None:
    """Writes a checkpoint's tokenizer into `folder`: with the same tokens, which transformers may add to on saving."""
    for name, content in HuggingFaceTokenizer(checkpoint).files().items():
        (folder / name).write_bytes(content)


def _parts_of(checkpoint: Checkpoint) -> TokenizerParts:
    if checkpoint.gguf_file:
        return gguf_parts(checkpoint.gguf_file)
    folder = tokenizer_folder(checkpoint)
    return folder_parts(folder) if (folder / TOKENIZER).is_file() else converted_parts(folder)


def same_tokens(draft: Tokenizer, target_sha256: str) -> None:
    """Raises ValueError unless draft and target have the same vocabulary."""
    if draft.sha256 != target_sha256:
        raise ValueError(
            f"draft_model: its tokenizer ({draft.sha256[:12]}) is not the target's ({target_sha256[:12]}); "
            "draft and target must share a vocabulary"
        )
