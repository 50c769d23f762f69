"""Builds a GGUF's tokenizer, equal to llama.cpp's."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from tandem.checkpoints.gguf_header import header_of
from tandem.checkpoints.json_files import data_of
from tandem.checkpoints.tokenizer_files import TokenizerParts, assembled, ends_with

_KEY = "tokenizer.ggml."
_ARRAYS = tuple(f"{_KEY}{name}" for name in ("tokens", "merges", "scores", "token_type"))
_NAMED = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
_DEFAULT_IDS = {"llama": {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}, "gpt2": {}}  # llama.cpp's
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # llama.cpp's kinds of tokens
_UNSTRIPPED = ("<unk>", "<s>", "<|endoftext|>")
_MOST_CUT = 1024  # characters of a token that is cut in two in all ways: their text grows by the square
_SPACE = "\u2581"


@functools.cache
def rules() -> dict[str, Any]:
    """llama.cpp's rules of byte-level vocabularies, by tokenizer.ggml.pre; keys: those that are read or have no effect.

    splits: expressions, each splitting the pieces before it; matches and gaps are pieces. whole: a piece that is a
    token is not merged. begun: texts begin with a token by default. found: tokens found in text whatever their kind.
    """
    read = data_of("gguf_tokenizer")
    splits = {pre: row["expressions"] for row in read["splits"] for pre in row["pre"]}
    return {**read, "splits": splits, "found": frozenset(read["found"])}


def gguf_parts(file: Path) -> TokenizerParts:
    header = header_of(file)
    values = header.values
    arrays = {name: found for name in _ARRAYS if (found := header.array(name)) is not None}
    kind = values.get(f"{_KEY}model")
    if kind not in _DEFAULT_IDS or not arrays.get(f"{_KEY}tokens"):
        raise ValueError(f"tokenizer.ggml.model: {kind!r:.60} is not gpt2 or llama, or there are no tokens")
    for key in values:
        if key.startswith(_KEY) and key.removeprefix(_KEY) not in rules()["keys"]:
            raise ValueError(f"{key}: {values[key]!r:.60} is not known")
    tokens = [token or f"[EMPTY_{place}]" for place, token in enumerate(arrays[f"{_KEY}tokens"])]
    if twice := next((token for token, count in Counter(tokens).items() if count > 1), None):
        raise ValueError(f"{_KEY}tokens: {twice!r:.60} stands twice")
    values = {**{f"{_KEY}{name}": place for name, place in _DEFAULT_IDS[kind].items()}, **values}
    pre = str(values.get(f"{_KEY}pre", "default"))
    if kind == "gpt2" and pre not in rules()["splits"]:
        raise ValueError(f"{_KEY}pre: {pre!r:.60} is not a known way to split text")
    listed = arrays.get(f"{_KEY}merges")
    merges = _implied(tokens, arrays.get(f"{_KEY}scores", ())) if listed is None else [_pair(each) for each in listed]
    prefixed = bool(values.get(f"{_KEY}add_space_prefix", True))
    backend = _byte_level(tokens, merges, pre) if kind == "gpt2" else _sentencepiece(tokens, merges, prefixed)
    _keep_whole(backend, tokens, arrays.get(f"{_KEY}token_type", ()), str(values.get("general.name")).lower())
    named = {name: _token_at(tokens, values, key) for name, key in _NAMED.items()}
    template = values.get("tokenizer.chat_template")
    if not isinstance(template, str | None):
        raise ValueError(f"tokenizer.chat_template: {template!r:.60} is not a text")
    made = assembled(backend, named, chat_template=template)
    begins = bool(values.get(f"{_KEY}add_bos_token", kind == "llama" or pre in rules()["begun"]))
    ends_with(backend, _end(made, "bos_token", begins), _end(made, "eos_token", values.get(f"{_KEY}add_eos_token")))
    return made


def _pair(merge: str) -> tuple[str, str]:
    at = merge.find(" ", 1)
    return merge[:at], merge[at + 1 :]


def _token_at(tokens: Sequence[str], values: Mapping[str, Any], key: str) -> str | None:
    place = values.get(f"{_KEY}{key}")
    if place is None:
        return None
    if type(place) is not int or not 0 <= place < len(tokens):
        raise ValueError(f"{_KEY}{key}: {place!r:.60} is not the id of one of {len(tokens)} tokens")
    return tokens[place]


def _end(made: TokenizerParts, name: str, wanted: object) -> tuple[str, int] | None:
    if not wanted:
        return None
    if (token := made.named.get(name)) is None:
        raise ValueError(f"{_KEY}{name}_id: is missing, and texts begin or end with it")
    return token, made.backend.token_to_id(token)


def _byte_level(tokens: Sequence[str], merges: Sequence[tuple[str, str]], pre: str) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    model = models.BPE(
        vocab={token: place for place, token in enumerate(tokens)},
        merges=list(merges),
        dropout=None,
        continuing_subword_prefix="",
        end_of_word_suffix="",
        fuse_unk=False,
        ignore_merges=pre in rules()["whole"],
    )
    backend = Tokenizer(model)
    splits = [pre_tokenizers.Split(Regex(split), behavior="isolated") for split in rules()["splits"][pre]]
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(tokens: Sequence[str], merges: Sequence[tuple[str, str]], prefixed: bool) -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers

    vocabulary = {token: place for place, token in enumerate(tokens)}
    model = models.BPE(vocab=vocabulary, merges=list(merges), fuse_unk=True, byte_fallback=True, dropout=None)
    backend = Tokenizer(model)
    first = [normalizers.Prepend(_SPACE)] if prefixed else []  # also after each special token
    backend.normalizer = normalizers.Sequence([*first, normalizers.Replace(" ", _SPACE)])
    strip = [decoders.Strip(content=" ", left=1)] if prefixed else []
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    backend.decoder = decoders.Sequence(steps)
    return backend


def _implied(tokens: Sequence[str], scores: Sequence[float]) -> list[tuple[str, str]]:
    # Every way to join two tokens, the likeliest result first.
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


def _keep_whole(backend: Any, tokens: Sequence[str], kinds: Sequence[int], model: str) -> None:
    from tokenizers import AddedToken

    found = rules()["found"]
    strips = "phi-3" in model or "phi3" in model  # llama.cpp knows by the name alone
    for token, kind in zip_longest(tokens, kinds):
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED) or token in found:
            strip = strips and token not in _UNSTRIPPED
            backend.add_tokens([AddedToken(token, normalized=False, special=kind == _CONTROL, rstrip=strip)])
