"""Converts text and token ids; fingerprints vocabularies."""

from __future__ import annotations

import codecs
import functools
import hashlib
import json
import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from tandem.checkpoints import tool_prompts
from tandem.checkpoints.gguf_tokenizer import gguf_parts
from tandem.checkpoints.hub_files import tokenizer_folder
from tandem.checkpoints.locate import Checkpoint, CheckpointError, first_line
from tandem.checkpoints.tokenizer_files import CONFIG, TEMPLATE, TOKENIZER, converted_parts, folder_parts
from tandem.speculation.stopping import TextStream


def byte_characters() -> list[str]:
    """Returns the character of each byte in byte-level vocabularies (GPT-2's table)."""
    shown = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in shown else chr(next(others)) for byte in range(256)]


BYTE = re.compile("<0x([+0-9A-Fa-f][0-9A-Fa-f])>")
_OF_TOKENS = {"Replace", "ByteFallback", "Strip", "Metaspace", "WordPiece", "BPEDecoder"}
_NONE, _ALL = re.compile("(?!)"), re.compile("(?s:.*)")


def decoding_steps(backend: Any) -> list[str]:
    """Returns a decoder's step names; Fuse alone has no effect."""
    if backend.decoder is None:
        return []
    decoder = json.loads(backend.decoder.__getstate__())
    names = [str(step["type"]) for step in decoder.get("decoders", [decoder])]
    return names if len(names) < 2 or names[1:] != ["Fuse"] else names[:1]


def held_tokens(steps: Sequence[str]) -> re.Pattern[str]:
    """Matches tokens without text until others follow; unknown decoder steps hold all tokens."""
    before, after = list(steps), []
    if "Fuse" in before:
        before, after = before[: before.index("Fuse")], before[before.index("Fuse") + 1 :]
    if not _OF_TOKENS.issuperset(before) or not {"Strip", "Fuse"}.issuperset(after):
        return _ALL
    return BYTE if "ByteFallback" in before else _NONE


class ByteText(TextStream):
    def __init__(self, bytes_of: Callable[[int], bytes]) -> None:
        self._bytes_of = bytes_of
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        return self._decoder.decode(self._bytes_of(token))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class TokenText(TextStream):
    """Streams tokens whose text depends on neighbours. `_tail`: the last with returned text, and held ones."""

    def __init__(self, backend: Any, skipped: Container[int], held: re.Pattern[str]) -> None:
        self._backend, self._skipped, self._held = backend, skipped, held
        self._tail: list[int] = []
        self._shown = 0

    def push(self, token: int) -> str:
        spelt = None if token in self._skipped else self._backend.id_to_token(token)
        if spelt is None:
            return ""
        self._tail.append(token)
        if self._held.fullmatch(spelt):
            return ""
        text = self._decode(self._tail)
        fresh, self._shown = text[self._shown :], len(text)
        for cut in (self._tail[-1:], self._tail[-2:]):
            if own := self._decode(cut):
                self._tail, self._shown = cut, len(own)
                break
        return fresh

    def flush(self) -> str:
        fresh = self._decode(self._tail)[self._shown :]
        self._tail, self._shown = [], 0
        return fresh

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(self._backend.decode(tokens, skip_special_tokens=True))


class Tokenizer(Protocol):
    sha256: str
    vocab_size: int  # ids are below it
    end_of_sequence_ids: tuple[int, ...]

    def encode(self, text: str, chat: bool) -> list[int]:
        """Returns the ids of `text`, or with `chat` of a user's message."""

    def stream(self) -> TextStream:
        """Returns a decoder of one sequence."""


@runtime_checkable
class ChatTokenizer(Tokenizer, Protocol):
    def tokens(self, text: str, special: bool) -> list[int]:
        """Returns token ids; `special`: with the model's first and last ones."""

    def render(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """Renders a chat with template `options`. Raises ValueError."""

    def tool_format(self) -> str:
        """Returns the template's tool format of tool_prompts.FORMATS, or ""."""

    def text(self, tokens: Sequence[int]) -> str:
        """Decodes tokens, special ones included."""

    def token_bytes(self, token: int) -> bytes:
        """Returns a token's bytes, perhaps partial characters."""


_BYTES = {character: byte for byte, character in enumerate(byte_characters())}


class HuggingFaceTokenizer:
    def __init__(self, checkpoint: Checkpoint) -> None:
        try:
            if file := checkpoint.gguf_file:
                self._parts = gguf_parts(file)
            else:
                folder = tokenizer_folder(checkpoint)
                self._parts = folder_parts(folder) if (folder / TOKENIZER).is_file() else converted_parts(folder)
            self._backend = self._parts.backend
            vocabulary = self._backend.get_vocab(with_added_tokens=True)
            self.sha256 = fingerprint(vocabulary, self._parts.compared_ids)
            self.special_ids = frozenset(self._parts.special_ids)
            self.vocab_size = max(vocabulary.values(), default=-1) + 1
            end = self._parts.named.get("eos_token")
            self.end_of_sequence_ids: tuple[int, ...] = () if end is None else (int(self._backend.token_to_id(end)),)
        except Exception as error:  # parsers of missing or damaged files raise anything
            raise CheckpointError(f"{checkpoint.folder}: no usable tokenizer: {first_line(error)[:300]}") from None

    def encode(self, text: str, chat: bool) -> list[int]:
        """Raises ValueError without a chat template, or if it refuses the text."""
        if not chat:
            return self.tokens(text, special=True)
        return self.tokens(self.render([{"role": "user", "content": text}], add_generation_prompt=True), special=False)

    def tokens(self, text: str, special: bool) -> list[int]:
        return list(self._backend.encode(text, add_special_tokens=special).ids)

    def render(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        if not self._parts.chat_template:
            raise ValueError("this model has no chat template")
        options, error, shortened = {**self._parts.named, **options}, None, ""
        tools = options.pop("tools", None)
        for form, offered in tool_prompts.forms(self._tool_format, messages, tools):
            render = functools.partial(self._rendered, offered, options)
            try:
                if tool_prompts.is_complete(form, render):
                    return render(form)
                shortened = shortened or render(form)
            except Exception as raised:  # whatever a template raises
                error = error or raised
        if error and not shortened:
            raise ValueError(f"the model's chat template refuses them: {first_line(error)[:300]}")
        return shortened

    def _rendered(self, tools: tool_prompts.Tools, options: Mapping[str, Any], messages: Sequence[Any]) -> str:
        from tandem.checkpoints import chat_templates

        return chat_templates.render(self._template(tools), messages, tools, **options)

    def _template(self, tools: Sequence[Any] | None) -> str:
        from tandem.checkpoints import chat_templates

        return chat_templates.chosen(self._parts.chat_template or "", tools)

    def tool_format(self) -> str:
        return self._tool_format if self._parts.chat_template else ""

    @functools.cached_property
    def _tool_format(self) -> str:
        named = self._parts.named
        return tool_prompts.format_of(self._template(()), lambda chat, tools: self._rendered(tools, named, chat))

    def text(self, tokens: Sequence[int]) -> str:
        return str(self._backend.decode(list(tokens), skip_special_tokens=False))

    def token_bytes(self, token: int) -> bytes:
        spelt = self._backend.id_to_token(token)
        if spelt is None:
            return b""
        if token not in self.special_ids:
            if not self._byte_level and (byte := BYTE.fullmatch(spelt)):
                return bytes([int(byte[1], 16)])
            if self._byte_level:
                try:
                    return bytes([_BYTES[character] for character in spelt])
                except KeyError:
                    return str(spelt).encode()
            return self.text([*self._before, token])[len(self.text(self._before)) :].encode()
        return self.text([token]).encode()

    @functools.cached_property
    def _before(self) -> list[int]:
        # After it, tokens have the text that they have inside a sequence.
        spelt = ((place, self._backend.id_to_token(place) or "") for place in range(self.vocab_size))
        plain = (p for p, token in spelt if p not in self.special_ids and not BYTE.fullmatch(token))
        return next(([place] for place in plain if self.text([place])), [])

    @functools.cached_property
    def _steps(self) -> list[str]:
        return decoding_steps(self._backend)

    @property
    def _byte_level(self) -> bool:
        return self._steps == ["ByteLevel"]

    def stream(self) -> TextStream:
        """Decodes generated tokens as `decode(ids, skip_special_tokens=True)` does."""
        if self._byte_level:
            return ByteText(lambda token: b"" if token in self._skipped else self.token_bytes(token))
        return TokenText(self._backend, self._skipped, held_tokens(self._steps))

    @functools.cached_property
    def _skipped(self) -> frozenset[int]:
        decode = self._backend.decode  # what it skips need not be what its tokens say
        added = self._backend.get_added_tokens_decoder()
        return frozenset(place for place in added if not decode([place]) and self.text([place]))

    def files(self) -> dict[str, bytes]:
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
        return str(self._backend.to_str())


def fingerprint(vocabulary: dict[str, int], special_ids: Iterable[int]) -> str:
    """Returns SHA-256 of vocabulary and special ids but padding's: equal if ids mean the same."""
    content = json.dumps([sorted(vocabulary.items()), sorted(special_ids)], ensure_ascii=True)
    return hashlib.sha256(content.encode()).hexdigest()


def write_tokenizer(checkpoint: Checkpoint, folder: Path) -> None:
    # transformers may add tokens on saving: keep ours.
    for name, content in HuggingFaceTokenizer(checkpoint).files().items():
        (folder / name).write_bytes(content)


def same_tokens(draft: Tokenizer, target_sha256: str) -> None:
    """Raises ValueError if vocabularies differ."""
    if draft.sha256 != target_sha256:
        raise ValueError(
            f"draft_model: its tokenizer ({draft.sha256[:12]}) is not the target's ({target_sha256[:12]}); "
            "draft and target must share a vocabulary"
        )
