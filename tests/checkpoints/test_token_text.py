"""Streamed text is one whole decode, in every style of tokenizer, at every split."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from tandem.checkpoints.locate import Checkpoint
from tandem.checkpoints.tokenizers import HuggingFaceTokenizer, decoding_steps, held_tokens
from tandem.speculation.stopping import Stopping

SCRIPTS = (
    "漢字かな交じり文",
    "🙂👩‍👩‍👧🏳️‍🌈🇩🇪🇯🇵",
    "e\u0301a\u0308\u0327o\u200d\u0301",
    "שלום مرحبا\u200f\u202ex\u202c",
    "नमस्ते ไทย 한국어",
)
ODD = "\x00\x01\x1b\x7f", "\u00a0\u3000\ufeff\u2028", "\ufffd\ufffd", "<s>x</s><unk><pad>", "<0xE6>▁##ing</w>"
PLAIN = "don't, we'LL stop . now ?", "def f(x):\n\n\treturn 2**10\r\n", "  two  spaces  ", "\n \n", "ab" * 40
PARTS = (*SCRIPTS, *ODD, *PLAIN, " ", "")
TEXTS = [
    *PARTS,
    *(a + b for n, a in enumerate(PARTS) for b in (" ", PARTS[n - 3], f" {PARTS[n - 5]} ", "é" * (20 + n))),
]
CORPUS = [*PLAIN * 9, *SCRIPTS, "hello world the cat sat on the mat"]
SPECIAL = ["<unk>", "<s>", "</s>", "<pad>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
STYLES = ("byte level", "llama 2", "gemma", "mid-word space", "unigram", "word pieces", "word ends", "no decoder")


def bpe(style: str) -> Tokenizer:
    made = Tokenizer(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=[*SPECIAL, *BYTES], max_token_length=6, show_progress=False
    )
    if style == "byte level":
        made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        trainer.initial_alphabet = [f"{c}" for c in pre_tokenizers.ByteLevel.alphabet()]
        trainer.special_tokens = [AddedToken(each, special=True) for each in SPECIAL]
        made.train_from_iterator(CORPUS, trainer)
        return made
    if style == "word ends":
        trainer.end_of_word_suffix = "</w>"
        made.pre_tokenizer, made.decoder = pre_tokenizers.Whitespace(), decoders.BPEDecoder()
        made.train_from_iterator(CORPUS, trainer)
        return made
    made.normalizer = normalizers.Replace(" ", "▁")
    made.train_from_iterator(CORPUS[:-8], trainer)
    merges = [tuple(each) for each in json.loads(made.to_str())["model"]["merges"]]
    made = Tokenizer(models.BPE(made.get_vocab(), merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    made.add_special_tokens(SPECIAL)
    prefix = [normalizers.Prepend("▁")] if style == "llama 2" else []
    made.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if style == "mid-word space":
        steps = [decoders.ByteFallback(), decoders.Metaspace()]
    made.decoder = decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] if prefix else [])])
    return made


def made(style: str) -> Tokenizer:
    if style == "unigram":
        tokenizer = Tokenizer(models.Unigram())
        tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
        tokenizer.train_from_iterator(
            CORPUS,
            trainers.UnigramTrainer(vocab_size=200, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False),
        )
        return tokenizer
    if style == "word pieces":
        tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
        tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
        tokenizer.train_from_iterator(
            CORPUS, trainers.WordPieceTrainer(vocab_size=200, special_tokens=SPECIAL, show_progress=False)
        )
        return tokenizer
    if style == "no decoder":
        words = {word: place for place, word in enumerate([*SPECIAL, "a", "b", " "])}
        tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
        tokenizer.add_special_tokens(SPECIAL)
        return tokenizer
    return bpe(style)


@pytest.fixture(params=STYLES, scope="module")
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> HuggingFaceTokenizer:
    folder: Path = tmp_path_factory.mktemp("style")
    made(request.param).save(str(folder / "tokenizer.json"))
    return HuggingFaceTokenizer(Checkpoint("m", str(folder)))


def whole(tokenizer: HuggingFaceTokenizer) -> Callable[[Sequence[int]], str]:
    backend = Tokenizer.from_str(tokenizer.spelling())
    return lambda ids: str(backend.decode(ids, skip_special_tokens=True))


def streamed(tokenizer: HuggingFaceTokenizer, ids: Sequence[int]) -> str:
    stream = tokenizer.stream()
    return "".join([*map(stream.push, ids), stream.flush()])


def answers(tokenizer: HuggingFaceTokenizer, texts: Sequence[str], drawn: int) -> Iterator[list[int]]:
    """Tokens of texts, and random ones: bytes that are no characters, special tokens, ids past the vocabulary."""
    yield from (tokenizer.tokens(text, special=False) for text in texts)
    draw = random.Random(7)
    for length in range(drawn):
        yield [draw.randrange(tokenizer.vocab_size + 2) for _ in range(length % 40)]
        yield [draw.randrange(4, min(264, tokenizer.vocab_size)) for _ in range(length % 40)]


def check(tokenizer: HuggingFaceTokenizer, texts: Sequence[str], drawn: int) -> None:
    decode = whole(tokenizer)
    for ids in answers(tokenizer, texts, drawn):
        for cut in range(len(ids) + 1):
            for part in (ids[:cut], ids[cut:]):
                assert streamed(tokenizer, part) == decode(part), part


def test_streamed_text_is_one_whole_decode(tokenizer: HuggingFaceTokenizer) -> None:
    check(tokenizer, TEXTS[:17], 30)


@pytest.mark.thorough
def test_streamed_text_is_one_whole_decode_of_many_texts(tokenizer: HuggingFaceTokenizer) -> None:
    assert len(TEXTS) >= 80
    check(tokenizer, TEXTS, 400)


def test_text_ends_before_a_stop_string(tokenizer: HuggingFaceTokenizer) -> None:
    decode = whole(tokenizer)
    for ids in answers(tokenizer, TEXTS[:15], 15):
        answer = decode(ids)
        for stop in {answer[at : at + 3] for at in range(0, len(answer), 4)}:
            stopping = Stopping(tokenizer.stream(), len(ids), stop_strings=(stop,))
            text = "".join(stopping.push([token]).text for token in ids)
            assert text == answer[: answer.find(stop)], (stop, ids)


def test_bytes_of_tokens_make_the_text_inside_a_sequence(tokenizer: HuggingFaceTokenizer) -> None:
    if '"BPEDecoder"' in tokenizer.spelling():  # the space after a word is in no token
        return
    large = tokenizer.vocab_size > 264
    before = next(token for token in range(260, 264) if tokenizer.text([token]).strip()) if large else 4
    for ids in answers(tokenizer, TEXTS[:17], 0):
        plain = [token for token in ids if token > 3]
        said = b"".join(map(tokenizer.token_bytes, plain)).decode(errors="replace")
        assert tokenizer.text([before, *plain]) == tokenizer.text([before]) + said


def test_an_unknown_decoder_shows_its_text_at_the_end() -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0}))
    tokenizer.decoder = decoders.Sequence([decoders.Fuse(), decoders.Replace("aa", "b")])
    assert held_tokens(decoding_steps(tokenizer)).fullmatch("any\n")
