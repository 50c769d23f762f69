"""Reads a folder's tokenizer without transformers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tandem.checkpoints.hub_files import need
from tandem.checkpoints.json_files import read_object

NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Special tokens in transformers' order."""


@dataclass(frozen=True, slots=True, eq=False)
class TokenizerParts:
    """`backend`: a tokenizers.Tokenizer. `named`: special tokens by name; `extra`: the others."""

    backend: Any
    named: Mapping[str, str] = field(default_factory=dict)
    extra: tuple[str, ...] = ()
    chat_template: str | Mapping[str, str] | None = None

    @property
    def special_ids(self) -> list[int]:
        return self._ids(self.named.values())

    @property
    def compared_ids(self) -> list[int]:
        return self._ids(token for name, token in self.named.items() if name != "pad_token")

    def _ids(self, named: Iterable[str]) -> list[int]:
        return [self.backend.token_to_id(token) for token in dict.fromkeys((*named, *self.extra))]


def assembled(
    backend: Any,
    named: Mapping[str, Any],
    extra: Sequence[Any] = (),
    added: Mapping[int, Any] | None = None,
    chat_template: str | Mapping[str, str] | None = None,
) -> TokenizerParts:
    """Adds special tokens as transformers does. `added`: by a slow tokenizer's ids; new ones get free ids."""
    from tokenizers import AddedToken

    backend.no_truncation()
    backend.no_padding()
    own = backend.get_added_tokens_decoder()
    known = {repr(token) for token in own.values()}
    by_text = {token.content: token for token in (*own.values(), *(added or {}).values())}
    named = {name: _whole(by_text, named[name]) for name in (*NAMED, *named) if named.get(name) is not None}
    special = [token for token in (*named.values(), *extra) if token is not None]
    fresh = [token for _, token in sorted((added or {}).items()) if repr(token) not in known]
    there = {token.content for token in (*own.values(), *fresh)}
    fresh += [_added(token) for token in special if _text(token) not in there]
    for token in fresh:
        if token.content in {_text(each) for each in named.values()}:
            token.special = True
        backend.add_tokens([token])
    backend.add_special_tokens([t if isinstance(t, AddedToken) else _added(t) for t in special])
    texts = {name: _text(token) for name, token in named.items()}
    return TokenizerParts(backend, texts, tuple(map(_text, extra)), chat_template)


def _whole(by_text: Mapping[str, Any], token: Any) -> Any:
    return by_text.get(_text(token), token)


def _added(token: Any) -> Any:
    from tokenizers import AddedToken

    return AddedToken(token, special=True, normalized=False) if isinstance(token, str) else token


def _text(token: Any) -> str:
    return token if isinstance(token, str) else str(token.content)


def ends_with(backend: Any, begin: tuple[str, int] | None, end: tuple[str, int] | None) -> None:
    from tokenizers import processors

    first, last = (f"{begin[0]}:0 " if begin else ""), (f" {end[0]}:0" if end else "")
    single = f"{first}$A:0{last}"
    pair = f"{single}{' ' + begin[0] + ':1' if begin else ''} $B:1{' ' + end[0] + ':1' if end else ''}"
    special = [each for each in (begin, end) if each]
    backend.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=special)


TOKENIZER, CONFIG, TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
_SPECIAL, _ADDED, _TEMPLATES = "special_tokens_map.json", "added_tokens.json", "additional_chat_templates"
_MOST_BYTES = 1 << 26  # of a JSON file


def folder_parts(folder: Path) -> TokenizerParts:
    from tokenizers import Tokenizer

    backend = Tokenizer.from_file(str(folder / TOKENIZER))
    config = _json(folder / CONFIG)
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    more = {name: value for name, value in config.items() if name.endswith("_token") and name not in NAMED}
    if isinstance(extra, Mapping):
        more, extra = {**more, **extra}, []
    named = {name: config.get(name) for name in NAMED} | {
        name: value for name, value in more.items() if isinstance(value, str | Mapping)
    }
    if "added_tokens_decoder" in config:
        added = {int(place): _token(token) for place, token in config["added_tokens_decoder"].items()}
    else:
        legacy = _json(folder / _SPECIAL)
        listed = legacy.pop("extra_special_tokens", None) or legacy.pop("additional_special_tokens", None) or []
        extra = extra or (listed if isinstance(listed, list) else [])
        named |= {name: value for name, value in legacy.items() if isinstance(value, str | Mapping)}
        added = dict(_of_slow(folder, named, extra))
    named = {name: _special(value) for name, value in named.items() if value is not None}
    made = assembled(backend, named, [_special(each) for each in extra], added, _template(folder, config))
    if backend.post_processor is None:
        ends_with(backend, None, None)
    return made


def converted_parts(folder: Path) -> TokenizerParts:
    """Converts an older tokenizer by transformers. Raises CheckpointError without it."""
    need(f"{folder}: it has no {TOKENIZER}, and to convert another tokenizer", "transformers")
    from transformers import AutoTokenizer

    made = AutoTokenizer.from_pretrained(folder)
    backend = getattr(made, "backend_tokenizer", None)
    if backend is None:
        raise ValueError("the tokenizer is not one of the tokenizers library")
    return TokenizerParts(
        backend, made.special_tokens_map, tuple(map(str, made.extra_special_tokens)), made.chat_template
    )


def _json(file: Path) -> dict[str, Any]:
    return read_object(file, _MOST_BYTES) if file.is_file() else {}


def _of_slow(folder: Path, named: Mapping[str, Any], extra: list[Any]) -> Iterator[tuple[int, Any]]:
    from tokenizers import AddedToken

    special = {each["content"] if isinstance(each, Mapping) else each for each in (*named.values(), *extra) if each}
    for text, place in _json(folder / _ADDED).items():
        yield int(place), AddedToken(text, normalized=text not in special, special=text in special)


def _token(value: Mapping[str, Any]) -> Any:
    from tokenizers import AddedToken

    given = {name: each for name, each in value.items() if name not in ("content", "__type", "id")}
    return AddedToken(str(value["content"]), **given)


def _special(value: Any) -> Any:
    return value if isinstance(value, str) else _token({**value, "special": True})


def _template(folder: Path, config: Mapping[str, Any]) -> str | dict[str, str] | None:
    # Template files come before tokenizer_config.json.
    found = {}
    if (folder / TEMPLATE).is_file():
        found["default"] = (folder / TEMPLATE).read_text(encoding="utf-8")
    for file in sorted((folder / _TEMPLATES).glob("*.jinja")):
        found[file.stem] = file.read_text(encoding="utf-8")
    if found:
        return found["default"] if list(found) == ["default"] else found
    template = config.get("chat_template")
    if isinstance(template, list):
        return {str(each["name"]): str(each["template"]) for each in template}
    return template if isinstance(template, str) else None
