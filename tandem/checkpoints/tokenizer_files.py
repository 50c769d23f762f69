"""Reads a folder's tokenizer without transformers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tandem.checkpoints.extras import need
from tandem.checkpoints.json_files import read_object
from tandem.checkpoints.tokenizer_parts import NAMED, TokenizerParts, assembled, ends_with

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
    said = config.get("chat_template")
    if isinstance(said, list):
        return {str(each["name"]): str(each["template"]) for each in said}
    return said if isinstance(said, str) else None
