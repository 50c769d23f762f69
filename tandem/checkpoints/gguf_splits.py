"""Pre-tokenization of GGUF's byte-level vocabularies by tokenizer.ggml.pre, as in llama.cpp."""

from __future__ import annotations

from collections.abc import Mapping

_SHORT = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
_BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_MARKS = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_BLANKS}"
_OTHERS = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_BLANKS}"
_LLAMA3 = rf"{_SHORT}|{_BEFORE}\p{{L}}+|\p{{N}}{{1,3}}|{_MARKS}"
_QWEN2 = rf"{_SHORT}|{_BEFORE}\p{{L}}+|\p{{N}}|{_MARKS}"
_UPPER, _LOWER = r"(?:(?=\p{L})[^a-z])", r"(?:(?=\p{L})[^A-Z])"
_MARKED = r"(?:(?=[\p{L}\p{M}])[^a-z])", r"(?:(?=[\p{L}\p{M}])[^A-Z])"
_UNCASED = r"[\p{L}\p{M}]", r"[\p{L}\p{M}]"  # llama.cpp takes \p{Lu} and the like for \p{L}
_WORD = "{before}{upper}*{lower}+{end}|{before}{upper}+{lower}*{end}"
_GROUPS = r"\P{N}*\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"  # of three digits from the right
_CJK = r"[一-龥぀-ゟ゠-ヿ]+"
_HAN = r"[一-龥ࠀ-一가-퟿&&\S]+"
_PUNCTUATED = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+"
_NO_POINTS = r" ?[^(\s|.,!?…。，、।۔،)]+"
_LETTERS = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-"
    "ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
_ASIAN = "[一-鿿㐀-䶿豈-﫿぀-ゟ゠-ヿ･-ﾟ⼀-⿟เ-๿຀-໿ក-៿က-႟ꩠ-ꩿꧠ-꧿가-힯ᄀ-ᇿ]+"
_SIGNS = r"[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥぀-ゟ゠-ヿ]+"


def _words(upper: str, lower: str, end: str = "") -> str:
    return _WORD.format(before=_BEFORE, upper=upper, lower=lower, end=end)


_TABLE: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("default", (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    ("minicpm5", (r"\p{N}{1,3}", rf"{_SHORT}|{_BEFORE}\p{{L}}+|\p{{N}}+|{_MARKS}")),
    ("llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano", (_LLAMA3,)),
    ("dbrx smaug-bpe chatglm-bpe glm4 glm5", (_LLAMA3,)),
    (
        "jais-2",
        (
            _LLAMA3.removesuffix(r"|\s+(?!\S)|\s+")
            + "".join(rf"|\s{{{n}}}(?!\S)" for n in ("512", "256", "128", "64", "32", "16", "8", "4", "1,2"))
            + r"|\s",
        ),
    ),
    (
        "deepseek-llm",
        ("[\r\n]", rf"\s?[{_LETTERS}]+", "\\s?[!-/:-~！-／：-～‘-‟、-。]+", r"\s+$", _HAN, r"\p{N}+"),
    ),
    ("deepseek-coder", ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN, r"\p{N}")),
    ("deepseek-v3 hunyuan-dense joyai-llm hy_v4", (r"\p{N}{1,3}", _CJK, rf"{_PUNCTUATED}[\r\n]*|{_BLANKS}")),
    ("spark2_5", (r"\p{N}{1,3}", _CJK, rf"{_PUNCTUATED}|[\r\n]|\s+(?!\S)|\s+", r"\p{N}")),
    ("youtu", (_SIGNS, rf"{_words(*_UNCASED, _SHORT + '?')}|\p{{N}}|{_OTHERS}")),
    ("falcon", (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")),
    ("starcoder refact command-r smollm codeshell exaone minerva-7b mellum2", (r"\p{N}", _GPT2)),
    ("gpt-2 phi-2 jina-es jina-de gigachat jina-v2-es jina-v2-de a.x-4.0 mellum modern-bert", (_GPT2,)),
    ("mpt olmo jais trillion granite-docling exaone4", (_GPT2,)),
    ("stablelm2 qwen2 deepseek-r1-qwen kormo f2llmv2 megrez hunyuan solar-open grok-2", (_QWEN2,)),
    (
        "qwen35",
        (rf"{_SHORT}|{_BEFORE}[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_BLANKS}",),
    ),
    ("poro-chat bloom gpt3-finnish", (_NO_POINTS,)),
    ("viking", (_NO_POINTS, r"\p{N}")),
    ("tekken", (rf"{_words(_UPPER, _LOWER)}|\p{{N}}|{_OTHERS}",)),
    (
        "chameleon",
        (
            *("<sentinel:[0-9]+>", "IMGIMG[A-I]{1,4}Z", "[\t\n]|    |  ", r"\p{N}"),
            *(r"[\p{P}!-/:-@\[-`{-~]", _GPT2),
        ),
    ),
    ("gpt-4o llama4 kanana2 talkie minimax-m2", (rf"{_words(_UPPER, _LOWER, _SHORT + '?')}|\p{{N}}{{1,3}}|{_OTHERS}",)),
    ("granite-embed-multi-97m", (rf"{_words(*_MARKED, _SHORT + '?')}|\p{{N}}{{1,3}}|{_OTHERS}",)),
    ("tiny_aya cohere2moe", (_GROUPS, rf"{_words(*_UNCASED, _SHORT + '?')}|\p{{N}}{{1,3}}|{_OTHERS}")),
    ("superbpe", (r"\p{N}+", "(?=([0-9]{3})+(?![0-9]))")),
    (
        "bailingmoe bailingmoe2 llada-moe",
        (
            rf"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])|{_BEFORE}\p{{L}}+|\p{{N}}"
            r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
        ),
    ),
    ("seed-coder", (rf"{_SHORT}|{_BEFORE}\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_BLANKS}",)),
    ("ufakzeka", (rf"{_BEFORE}\p{{L}}+|\p{{N}}|{_MARKS}",)),
    ("afmoe", (_GROUPS, _ASIAN, rf"{_PUNCTUATED}[\r\n]*|{_BLANKS}")),
    ("laguna", (r"[^\n]+|[\n]+", _QWEN2)),
    (
        "exaone-moe",
        (
            rf"{_SHORT}|{_BEFORE}(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
            r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
        ),
    ),
)
_FOUND = """
<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn> <|endoftext|> </s> <|eom_id|> <EOT>
_<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> <eos> <turn|> <|tool_response> [e~[ <｜end▁of▁sentence｜>
<|channel|> <|message|> <|start|> <|constrain|>
"""
FOUND = frozenset(_FOUND.split())  # found in text whatever their kind
SPLITS: Mapping[str, tuple[str, ...]] = {name: splits for names, splits in _TABLE for name in names.split()}
"""Expressions, each splitting the pieces before it; matches and gaps are pieces."""
WHOLE = frozenset(f"{_TABLE[2][0]} minicpm5 youtu glm4 glm5 tekken granite-embed-multi-97m".split())
"""Where a piece that is a token is not merged."""
BEGUN = frozenset(f"{_TABLE[2][0]} tekken chameleon".split())  # where texts begin with a token by default
