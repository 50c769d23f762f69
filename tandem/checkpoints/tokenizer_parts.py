"""A tokenizer's backend, special tokens and chat template."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

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
