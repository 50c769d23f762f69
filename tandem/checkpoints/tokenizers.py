"""Converts text to token ids and back; fingerprints vocabularies so that draft and target can compare them."""

from __future__ import annotations

import functools
import hashlib
import json
import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from tandem.checkpoints.locate import Checkpoint, CheckpointError, first_line
from tandem.speculation.stopping import TextStream

_BYTE = re.compile("<0x([0-9A-F]{2})>")
_SPACE = "\u2581"
_INCOMPLETE = "�"
_SAVED_BY_5 = "TokenizersBackend"


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


@runtime_checkable
class HasFiles(Protocol):
    """A tokenizer that other programs can load too."""

    def files(self) -> dict[str, bytes]:
        """The files, by name, that Hugging Face's libraries load this tokenizer from."""


def byte_characters() -> list[str]:
    """Returns the printable character that stands for each byte in a byte-level vocabulary (GPT-2's table)."""
    shown = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in shown else chr(next(others)) for byte in range(256)]


_BYTES = {character: byte for byte, character in enumerate(byte_characters())}


class HuggingFaceTokenizer:
    """Wraps a checkpoint's transformers tokenizer. Raises CheckpointError."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        try:
            self._tokenizer = _from_transformers(checkpoint.source)
            vocabulary = self._tokenizer.get_vocab()
            self.sha256 = fingerprint(vocabulary, self._tokenizer.all_special_ids)
            self.vocab_size = max(vocabulary.values(), default=-1) + 1
            self.end_of_sequence_ids = _end_ids(self._tokenizer)
        except Exception as error:  # parsers of missing or damaged files raise anything
            raise CheckpointError(f"{checkpoint.folder}: no usable tokenizer: {first_line(error)[:300]}") from None

    def encode(self, text: str, chat: bool) -> list[int]:
        """Like Tokenizer.encode. Raises ValueError if there is no chat template."""
        if not chat:
            return list(self._tokenizer(text)["input_ids"])
        if not self._tokenizer.chat_template:
            raise ValueError("chat: this model has no chat template")
        rendered = self._tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False
        )
        return list(self._tokenizer(rendered, add_special_tokens=False)["input_ids"])

    def tokens(self, text: str, special: bool) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=special)["input_ids"])

    def render(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """Like Tokenizer.render. What a template raises is about the messages that it was given."""
        if not self._tokenizer.chat_template:
            raise ValueError("this model has no chat template")
        try:
            return str(self._tokenizer.apply_chat_template(list(messages), tokenize=False, **options))
        except Exception as error:
            raise ValueError(f"the model's chat template refuses them: {first_line(error)[:300]}") from None

    def takes_tools(self) -> bool:
        return "tools" in str(self._tokenizer.chat_template)

    def text(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), clean_up_tokenization_spaces=False))

    def token_bytes(self, token: int) -> bytes:
        spelt = str(self._tokenizer.convert_ids_to_tokens(token))
        if token not in self._tokenizer.all_special_ids:
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
        try:
            return "ByteLevel" in json.dumps(json.loads(self.spelling()).get("decoder"))
        except ValueError:
            return False

    def stream(self) -> TextStream:
        return IncrementalText(self._tokenizer)

    def files(self) -> dict[str, bytes]:
        with tempfile.TemporaryDirectory() as folder:
            self._tokenizer.save_pretrained(folder)
            return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir()) if path.is_file()}

    def spelling(self) -> str:
        """The JSON of the tokenizers library, which spells every token. Raises ValueError if there is none."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ValueError("the tokenizer is not one of the tokenizers library")
        return str(backend.to_str())


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
        return self._tokenizer.decode(self._tail, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def fingerprint(vocabulary: dict[str, int], special_ids: Iterable[int]) -> str:
    """SHA-256 of the vocabulary and special ids; equal if token ids mean the same."""
    content = json.dumps([sorted(vocabulary.items()), sorted(special_ids)], ensure_ascii=True)
    return hashlib.sha256(content.encode()).hexdigest()


def _from_transformers(source: dict[str, object]) -> Any:
    """A tokenizer; transformers 4.57 (of NxD Inference) knows the class that transformers 5 saves by its old name."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        return AutoTokenizer.from_pretrained(**source)
    except ValueError as error:
        if _SAVED_BY_5 not in str(error):
            raise
        return PreTrainedTokenizerFast.from_pretrained(**source)


def _end_ids(tokenizer: Any) -> tuple[int, ...]:
    return () if tokenizer.eos_token_id is None else (int(tokenizer.eos_token_id),)


def same_tokens(draft: Tokenizer, target_sha256: str) -> None:
    """Raises ValueError unless draft and target have the same vocabulary."""
    if draft.sha256 != target_sha256:
        raise ValueError(
            f"draft_model: its tokenizer ({draft.sha256[:12]}) is not the target's ({target_sha256[:12]}); "
            "draft and target must share a vocabulary"
        )
