"""Makes the tokenizer that a GGUF's metadata describes, as transformers does."""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tandem.checkpoints.byte_level import byte_characters
from tandem.checkpoints.gguf_header import Header
from tandem.checkpoints.tokenizer_parts import TokenizerParts, assembled, ends_with

_KEY = "tokenizer.ggml."
_ARRAYS = tuple(f"{_KEY}{name}" for name in ("tokens", "merges", "scores", "token_type"))
_NAMED = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
_CONTROL, _USER_DEFINED = 3, 4  # llama.cpp's kinds of tokens
_MOST_CUT = 1024  # characters of a token that is cut in two in all ways: their text grows by the square
_SPACE = "\u2581"
_DIGITS = r"\p{N}{1,3}"
_WORDS = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_ENDS = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CONTRACTED = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
_BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTED}|{_BEFORE}\p{{L}}+|{_DIGITS}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_BLANKS}"
_TEKKEN = rf"{_BEFORE}{_WORDS}*{_ENDS}+|{_BEFORE}{_WORDS}+{_ENDS}*|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_BLANKS}"
_QWEN2 = rf"{_CONTRACTED}|{_BEFORE}\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_BLANKS}"
_GPT4O = (
    rf"{_BEFORE}{_WORDS}*{_ENDS}+{_CONTRACTED}?|{_BEFORE}{_WORDS}+{_ENDS}*{_CONTRACTED}?"
    rf"|{_DIGITS}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_BLANKS}"
)
_OF_LLAMA3 = ("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "smaug-bpe", "dbrx")
SPLITS = {
    **dict.fromkeys(_OF_LLAMA3, _LLAMA3),
    "tekken": _TEKKEN,
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), _QWEN2),
    **dict.fromkeys(("gpt-4o", "llama4"), _GPT4O),
}
"""How text is split before merging, by what llama.cpp calls the way. Others split as GPT-2 does."""


def gguf_parts(file: Path) -> TokenizerParts:
    """Reads the tokenizer of a GGUF file. Raises OSError or ValueError."""
    with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
        header = Header(content, _ARRAYS)
    values, arrays = header.values, header.arrays
    tokens = arrays.get(f"{_KEY}tokens")
    kind = values.get(f"{_KEY}model")
    if tokens is None or kind not in ("gpt2", "llama"):
        raise ValueError(f"tokenizer.ggml.model: {kind!r:.60} is not gpt2 or llama, or there are no tokens")
    listed = arrays.get(f"{_KEY}merges")
    merges = _implied(tokens, arrays.get(f"{_KEY}scores", ())) if listed is None else [_pair(each) for each in listed]
    backend = _byte_level(tokens, merges) if kind == "gpt2" else _sentencepiece(tokens, merges)
    _keep_whole(backend, tokens, arrays.get(f"{_KEY}token_type", ()), kind == "gpt2")
    if split := SPLITS.get(str(values.get(f"{_KEY}pre"))):
        backend.pre_tokenizer = _splitting(split)
    named = {name: _token_at(tokens, values, key) for name, key in _NAMED.items()}
    template = values.get("tokenizer.chat_template")
    if not isinstance(template, str | None):
        raise ValueError(f"tokenizer.chat_template: {template!r:.60} is not a text")
    made = assembled(backend, named, chat_template=template)
    begins = bool(values.get(f"{_KEY}add_bos_token", kind == "llama"))
    ends_with(backend, _end(made, "bos_token", begins), _end(made, "eos_token", values.get(f"{_KEY}add_eos_token")))
    return made


def _pair(merge: str) -> tuple[str, str]:
    one, _, other = merge.partition(" ")
    return one, other


def _token_at(tokens: Sequence[str], values: Mapping[str, Any], key: str) -> str | None:
    place = values.get(f"{_KEY}{key}")
    if place is None:
        return None
    if type(place) is not int or not 0 <= place < len(tokens):
        raise ValueError(f"{_KEY}{key}: {place!r:.60} is not the id of one of {len(tokens)} tokens")
    return tokens[place]


def _end(made: TokenizerParts, name: str, wanted: object) -> tuple[str, int] | None:
    token = made.named.get(name) if wanted else None
    return None if token is None else (token, made.backend.token_to_id(token))


def _byte_level(tokens: Sequence[str], merges: Sequence[tuple[str, str]]) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    spelt = byte_characters()
    alphabet = set(spelt)
    vocabulary = {
        token if set(token) <= alphabet else "".join(spelt[byte] for byte in token.encode()): place
        for place, token in enumerate(tokens)
    }
    model = models.BPE(
        vocab=vocabulary,
        merges=list(merges),
        dropout=None,
        continuing_subword_prefix="",
        end_of_word_suffix="",
        fuse_unk=False,
    )
    backend = Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return assembled(backend, {"bos_token": "<|endoftext|>"}).backend


def _sentencepiece(tokens: Sequence[str], merges: Sequence[tuple[str, str]]) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {token: place for place, token in enumerate(tokens)}
    model = models.BPE(vocab=vocabulary, merges=list(merges), fuse_unk=True, byte_fallback=True, dropout=None)
    backend = Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement=_SPACE, prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace(_SPACE, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1),
        ]
    )
    usual = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return assembled(backend, usual).backend


def _implied(tokens: Sequence[str], scores: Sequence[float]) -> list[tuple[str, str]]:
    """The merges that a vocabulary implies: every way to make a token of two others, the likeliest token first."""
    if len(scores) != len(tokens):
        raise ValueError(f"{_KEY}scores: {len(scores)} scores, and there are {len(tokens)} tokens")
    if (longest := max(map(len, tokens), default=0)) > _MOST_CUT:
        raise ValueError(f"{_KEY}tokens: one has {longest} characters; without merges the limit is {_MOST_CUT}")
    places = {token: place for place, token in enumerate(tokens)}
    found: list[tuple[str, str, float]] = []
    for token, score in dict(zip(tokens, scores, strict=True)).items():
        halves = [(token[:at], token[at:]) for at in range(1, len(token))]
        pairs = [(one, other) for one, other in halves if one in places and other in places]
        found += [(*pair, score) for pair in sorted(pairs, key=lambda pair: (places[pair[0]], places[pair[1]]))]
    found.sort(key=lambda each: (each[2], len(each[0]), len(each[1])), reverse=True)
    return [(one, other) for one, other, _ in found]


def _keep_whole(backend: Any, tokens: Sequence[str], kinds: Sequence[int], byte_level: bool) -> None:
    """Adds control tokens as special ones, and tokens that users defined; else they would be cut into pieces.

    In a byte-level vocabulary a control token that is spelt with other characters is a mistake of the file.
    """
    from tokenizers import AddedToken

    alphabet = set(byte_characters())
    pairs = list(zip(tokens, kinds, strict=False))
    control = [
        AddedToken(token, normalized=False, special=True)
        for token, kind in pairs
        if kind == _CONTROL and (not byte_level or set(token) <= alphabet)
    ]
    backend.add_special_tokens(control)
    vocabulary = backend.get_vocab(with_added_tokens=True)
    own = [token for token, kind in pairs if kind == _USER_DEFINED and token in vocabulary]
    backend.add_tokens([AddedToken(token, normalized=False, special=False) for token in own])


def _splitting(split: str) -> Any:
    from tokenizers import Regex, pre_tokenizers

    parts = [
        pre_tokenizers.Split(Regex(split), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
    return pre_tokenizers.Sequence(parts)
