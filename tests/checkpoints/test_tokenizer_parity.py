"""Our tokenizers have the ids, texts, fingerprints and rendered chats of transformers, which servers do without."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, GPT2Tokenizer, LlamaTokenizer, PreTrainedTokenizerFast, Qwen2Tokenizer

from tandem.checkpoints.locate import EMBEDDED_DRAFT, Checkpoint, CheckpointError, find
from tandem.checkpoints.tokenizers import HuggingFaceTokenizer, fingerprint
from tandem.checkpoints.tool_prompts import forms
from tests.daily import daily
from tests.gguf_files import write_gguf

TEXTS = (
    "",
    " ",
    "hello world",
    "  two spaces, and  two more  ",
    "Ünïcödé, 漢字 and 🙂 emoji 👩‍👩‍👧; don't, we'LL, I've",
    "def f(x):\n    return x**2  # 12345 678\n\n\n\tend\r\n",
    "<|im_start|>user\nhi<|im_end|>\n<think>so</think><s>x</s><unk>",
    "a<|end|>b <|end|> c",
    "The year 2024 had 366 days; 1,000,000.50 - ok?",
    "\u00a0\u3000\ufeff\x00\x7f e\u0301",
)
CORPUS = [
    *TEXTS * 3,
    "the cat sat on the mat with the hat",
    "hello hello world world 2024 2024",
    "return x def f(x): end",
]
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
RICH = """{{- bos_token }}{%- set ns = namespace(seen=false, tools=tools or []) %}
{%- if tools %}
    {{- 'Tools:' }}{% for tool in tools %}{{ tool | tojson }}{{ tool | tojson(indent=2) }}{% endfor %}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'skip' %}{% continue %}{% endif %}
    {%- if message.role == 'bad' %}{{ raise_exception('no ' + message.role) }}{% endif %}
    {%- if message.role == 'assistant' %}{% generation %}{{ message.content | trim }}{% endgeneration %}
    {%- else %}<{{ message.role }}>{{ message.content }}{% set ns.seen = true %}{% endif %}
    {%- if message.tool_calls is defined %}{% for call in message.tool_calls %}{{ call.function | tojson }}{% endfor %}{% endif %}
    {%- if message.reasoning_content is defined %}({{ message.reasoning_content }}){% endif %}
    {%- if loop.last %}{% break %}{% endif %}
{%- endfor %}
{{ dict(a=1, b=[2]) | tojson }}{{ strftime_now('%Y') }}{{ ns.seen }}{{ eos_token }}
{%- if add_generation_prompt %}<assistant>{% if enable_thinking is defined and not enable_thinking %}quick{% endif %}{% endif %}
"""  # noqa: E501


def byte_level_bpe(size: int = 400) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=special, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def vocabulary_and_merges(tokenizer: Tokenizer) -> tuple[dict[str, int], list[tuple[str, str]]]:
    model = json.loads(tokenizer.to_str())["model"]
    return model["vocab"], [tuple(each) for each in model["merges"]]


def sentencepiece_tokens() -> list[str]:
    """A vocabulary as Llama 2 has it: special tokens, bytes, pieces."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=300))
    pieces = sorted(
        set(trained.get_vocab()) - {"<s>", "</s>", "<unk>", "<|end|>", "<think>"},
        key=lambda piece: (-len(piece), piece),
    )
    return ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces, "<|end|>", "<think>"]


def tokenizer_file(file: Path, architecture: str, **values: Any) -> Checkpoint:
    """A GGUF file of metadata alone, besides one small tensor."""
    count = len(values["tokens"])
    sizes = {"context_length": 64, "block_count": 1, "feed_forward_length": 16, "embedding_length": 16}
    sizes |= {"attention.head_count": 1, "attention.head_count_kv": 1, "vocab_size": count}
    keys: dict[str, Any] = {f"{architecture}.{name}": value for name, value in sizes.items()}
    keys[f"{architecture}.attention.layer_norm_rms_epsilon"] = 1e-5
    for name, value in values.items():
        key = f"tokenizer.{name}" if name == "chat_template" else f"tokenizer.ggml.{name}"
        keys[name if "." in name else key] = value
    write_gguf(file, architecture, keys, {"token_embd.weight": np.zeros((count, 16), dtype=np.float32)})
    return Checkpoint(file.stem, str(file.parent), file.name)


def byte_level_gguf(architecture: str, pre: str, **more: Any) -> Callable[[Path], Checkpoint]:
    def make(folder: Path) -> Checkpoint:
        vocabulary, merges = vocabulary_and_merges(byte_level_bpe())
        tokens = [*sorted(vocabulary, key=vocabulary.__getitem__), "<think>", "<|end|>"]
        kinds = [3 if token.startswith("<|") else 4 if token == "<think>" else 1 for token in tokens]
        values: dict[str, Any] = {"model": "gpt2", "pre": pre, "tokens": tokens, "token_type": kinds}
        values |= {"merges": [" ".join(pair) for pair in merges], "bos_token_id": 1, "eos_token_id": 2}
        values |= {"unknown_token_id": 0, "padding_token_id": 2, "chat_template": CHATML}
        return tokenizer_file(folder / f"{pre}.gguf", architecture, **values, **more)

    return make


def saved(make: Callable[[], Any], **config: Any) -> Callable[[Path], Checkpoint]:
    def write(folder: Path) -> Checkpoint:
        make().save_pretrained(folder)
        (folder / "config.json").write_text('{"model_type": "llama"}')
        file = folder / "tokenizer_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **config}))
        return Checkpoint("m", str(folder))

    return write


def wrapped(**options: Any) -> Callable[[], PreTrainedTokenizerFast]:
    def make() -> PreTrainedTokenizerFast:
        tokenizer = byte_level_bpe()
        tokenizer.normalizer = normalizers.NFC()
        tokenizer.add_tokens([AddedToken("<think>", normalized=False)])
        ends = [("<|im_start|>", tokenizer.token_to_id("<|im_start|>"))]
        tokenizer.post_processor = processors.TemplateProcessing("<|im_start|> $A", special_tokens=ends)
        return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **options)

    return make


def as_class(kind: Any, **options: Any) -> Callable[[], Any]:
    def make() -> Any:
        if kind is LlamaTokenizer:
            tokens = sentencepiece_tokens()
            return kind(vocab={token: place for place, token in enumerate(tokens)}, merges=[], **options)
        vocabulary, merges = vocabulary_and_merges(byte_level_bpe())
        return kind(vocab=vocabulary, merges=merges, **options)

    return make


NAMED = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>", "chat_template": CHATML}
MADE: dict[str, Callable[[Path], Checkpoint]] = {
    "the embedded target": lambda folder: find(None),
    "the embedded draft": lambda folder: find(str(EMBEDDED_DRAFT)),
    **{
        f"GGUF, split as {pre}": byte_level_gguf("llama", pre, add_bos_token=False)
        for pre in ("gpt-2", "llama-bpe", "tekken", "qwen2", "gpt-4o")
    },
    "GGUF of Qwen 3 that begins and ends texts": byte_level_gguf(
        "qwen3", "qwen2", add_bos_token=True, add_eos_token=True
    ),
    "folder": saved(wrapped(**NAMED)),
    "folder with tokens that are not in the vocabulary": saved(
        wrapped(**NAMED, extra_special_tokens=["<|new|>", "<think>"], unk_token="<|unknown|>")
    ),
    "folder with named special tokens of its own": saved(
        wrapped(**NAMED), image_token="<|image|>", extra_special_tokens={"audio_token": "<|audio|>"}
    ),
    "folder with two templates": saved(
        wrapped(**{**NAMED, "chat_template": None}),
        chat_template=[{"name": "default", "template": CHATML}, {"name": "tool_use", "template": RICH}],
    ),
    "folder of LlamaTokenizer": saved(as_class(LlamaTokenizer, chat_template=RICH)),
    "folder of Qwen2Tokenizer": saved(as_class(Qwen2Tokenizer, chat_template=RICH)),
    "folder of GPT2Tokenizer": saved(as_class(GPT2Tokenizer, chat_template=CHATML)),
}
TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "täglich <b>", "parameters": {"type": "object", "properties": {}}},
}
CALL = {"function": {"name": "weather", "arguments": {"city": "Köln", "days": 2}}}
CHATS: tuple[tuple[list[dict[str, Any]], dict[str, Any]], ...] = (
    ([{"role": "user", "content": "hi"}], {"add_generation_prompt": True}),
    ([{"role": "system", "content": "be <kind>"}, {"role": "user", "content": "hi & bye"}], {}),
    (
        [
            {"role": "user", "content": "weather?", "name": None},
            {"role": "assistant", "content": "  let me see ", "tool_calls": [CALL], "reasoning": "well"},
            {"role": "tool", "content": "{\"rain\": true}"},
        ],
        {"tools": [TOOL], "add_generation_prompt": True, "enable_thinking": False},
    ),
    ([{"role": "skip", "content": "x"}, {"role": "user", "content": "y"}], {"tools": None}),
)  # fmt: skip
BAD: tuple[tuple[list[dict[str, Any]], dict[str, Any]], ...] = (
    ([], {}),
    ([{"role": "bad", "content": "x"}], {}),
    ([{"role": "user"}], {}),
)


@pytest.fixture(params=daily(MADE, 1, 2, 3, 7, 9, 11, 12, 14), scope="module")
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[HuggingFaceTokenizer, Any]:
    checkpoint = MADE[request.param](tmp_path_factory.mktemp("made"))
    return HuggingFaceTokenizer(checkpoint), AutoTokenizer.from_pretrained(**checkpoint.source)


def test_ids_texts_and_fingerprints_are_those_of_transformers(both: tuple[HuggingFaceTokenizer, Any]) -> None:
    ours, theirs = both
    assert ours.sha256 == fingerprint(theirs.get_vocab(), theirs.all_special_ids)
    assert ours.vocab_size == max(theirs.get_vocab().values()) + 1
    assert ours.end_of_sequence_ids == (() if theirs.eos_token_id is None else (theirs.eos_token_id,))
    backend = Tokenizer.from_str(ours.spelling())
    for text in (*TEXTS, *(" ".join(TEXTS),)):
        ids = theirs(text)["input_ids"]
        assert ours.encode(text, chat=False) == ids == ours.tokens(text, special=True), text
        assert ours.tokens(text, special=False) == theirs(text, add_special_tokens=False)["input_ids"], text
        assert ours.text(ids) == theirs.decode(ids, clean_up_tokenization_spaces=False)
        stream = ours.stream()
        streamed = "".join([*map(stream.push, ids), stream.flush()])
        assert streamed == backend.decode(ids, skip_special_tokens=True)
    models = [json.loads(spelt)["model"] for spelt in (ours.spelling(), theirs.backend_tokenizer.to_str())]
    assert models[0] == models[1] | {"ignore_merges": models[0]["ignore_merges"]}  # llama.cpp's differ by GGUF's pre


def test_chats_are_rendered_as_transformers_renders_them(both: tuple[HuggingFaceTokenizer, Any]) -> None:
    ours, theirs = both
    if not theirs.chat_template:
        with pytest.raises(ValueError, match="no chat template"):
            ours.render(*CHATS[0][:1])
        return
    for messages, options in CHATS:
        shown, tools = next(forms(ours.tool_format(), messages, options.get("tools")))
        wanted = theirs.apply_chat_template(shown, tokenize=False, **{**options, "tools": tools})
        assert ours.render(messages, **options) == wanted, options
    asked = theirs.apply_chat_template([{"role": "user", "content": "hi"}], add_generation_prompt=True, tokenize=False)
    assert ours.encode("hi", chat=True) == theirs(asked, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize(("messages", "options"), BAD)
def test_what_a_template_refuses_is_refused_in_one_line(messages: Any, options: Any, tmp_path: Path) -> None:
    checkpoint = saved(wrapped(**{**NAMED, "chat_template": RICH}))(tmp_path)
    ours, theirs = HuggingFaceTokenizer(checkpoint), AutoTokenizer.from_pretrained(tmp_path)
    try:
        wanted = theirs.apply_chat_template(messages, tokenize=False, **options)
    except Exception:
        with pytest.raises(ValueError, match="the model's chat template refuses them") as caught:
            ours.render(messages, **options)
        assert "\n" not in str(caught.value)
    else:
        assert ours.render(messages, **options) == wanted


NAMES = [{"id": name, "function": {"name": name, "arguments": {}}} for name in ("f", "g")]
AGENT = [
    {"role": "system", "content": "first"},
    {"role": "user", "content": "b"},
    {"role": "assistant", "content": "c", "tool_calls": NAMES},
    *({"role": "tool", "content": name.upper(), "tool_call_id": name} for name in ("g", "f")),
    {"role": "user", "content": "d"},
    {"role": "system", "content": "last"},
]
EACH = "{% for m in messages %}{% if IF %}{{ raise_exception('no') }}{% endif %}"
SAID = "<{{ m.role }}>{{ m.content }}"
CALLS = "".join(f'\n<tool_call>\n{{"name": "{name}", "arguments": {{}}}}\n</tool_call>' for name in "fg")
ANSWERS = "\n".join(f"<tool_response>\n{name}\n</tool_response>" for name in "GF")
STRICT = {
    "one call, no text beside it, as of Llama 3": (
        EACH.replace("IF", "(m.tool_calls or ()) | length > 1")
        + "{% if m.tool_calls %}<c>{{ m.tool_calls[0].function|tojson }}{% else %}" + SAID + "{% endif %}{% endfor %}",
        "<system>first<user>b<assistant>c"
        '<c>{"name": "g", "arguments": {}}<tool>G<c>{"name": "f", "arguments": {}}<tool>F<user>d<system>last',
    ),
    "turns of user and model alone, as of Gemma 2": (
        EACH.replace("IF", "(m.role == 'user') != (loop.index0 % 2 == 0)") + SAID + "{% endfor %}",
        f"<user>first\n\nlast\n\nb<assistant>c{CALLS}<user>{ANSWERS}\n\nd",
    ),
    "one system message, as of gpt-oss": (
        EACH.replace("IF", "0") + "{% if m.role != 'system' or loop.first %}" + SAID + "{% endif %}{% endfor %}",
        f"<system>first\n\nlast<user>b<assistant>c{CALLS}<user>{ANSWERS}<user>d",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", STRICT)
def test_a_chat_that_a_template_refuses_or_shortens_is_said_in_a_form_that_it_takes(name: str, tmp_path: Path) -> None:
    template, wanted = STRICT[name]
    assert HuggingFaceTokenizer(saved(wrapped(chat_template=template))(tmp_path)).render(AGENT) == wanted


@pytest.mark.parametrize(
    "hostile",
    [
        "{{ messages.__class__ }}{{ ''.__class__.__mro__ }}x",
        "{{ dict.__class__ }}y",
        "{% set ns = namespace(__class__=1) %}",
        "{{ lipsum.__globals__['os'].popen('id').read() }}",
    ],
)
def test_a_hostile_template_reaches_nothing(hostile: str, tmp_path: Path) -> None:
    checkpoint = saved(wrapped(**{**NAMED, "chat_template": hostile}))(tmp_path)
    try:
        text = HuggingFaceTokenizer(checkpoint).render(CHATS[0][0])
    except ValueError as error:
        assert "refuses them" in str(error)
    else:
        assert text in ("x", "y")


def test_the_files_of_a_tokenizer_make_the_same_one(both: tuple[HuggingFaceTokenizer, Any], tmp_path: Path) -> None:
    ours, _ = both
    for name, content in ours.files().items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    again, theirs = HuggingFaceTokenizer(Checkpoint("m", str(tmp_path))), AutoTokenizer.from_pretrained(tmp_path)
    assert again.sha256 == ours.sha256 == fingerprint(theirs.get_vocab(), theirs.all_special_ids)
    text = " ".join(TEXTS)
    assert again.encode(text, chat=False) == ours.encode(text, chat=False) == theirs(text)["input_ids"]


VOCABULARY = {"a": 0, "b": 1, "<end>": 2}


@pytest.mark.parametrize(
    ("vocabulary", "special", "same"),
    [
        ({"<end>": 2, "b": 1, "a": 0}, [2], True),
        ({"a": 1, "b": 0, "<end>": 2}, [2], False),
        ({"a": 0, "b": 1, "<END>": 2}, [2], False),
        ({**VOCABULARY, "c": 3}, [2], False),
        (VOCABULARY, [1], False),
    ],
    ids=["in another order", "swapped", "renamed", "larger", "other special"],
)
def test_fingerprints_are_equal_if_ids_mean_the_same(
    vocabulary: dict[str, int], special: list[int], same: bool
) -> None:
    assert (fingerprint(vocabulary, special) == fingerprint(VOCABULARY, [2])) == same


def word_level(folder: Path) -> Checkpoint:
    """A tokenizer of five words."""
    folder.mkdir(parents=True, exist_ok=True)
    words = {"hello": 0, "world": 1, "<unk>": 2, "<end>": 3, "again": 4}
    end = {"id": 3, "content": "<end>", "special": True}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    document = {
        "version": "1.0",
        "added_tokens": [end | flags],
        "pre_tokenizer": {"type": "Whitespace"},
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "<unk>"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(document))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return Checkpoint("words", str(folder))


def test_a_draft_that_pads_with_another_token_has_the_targets_vocabulary(tmp_path: Path) -> None:
    target = HuggingFaceTokenizer(word_level(tmp_path / "m"))
    for role, same in (("pad_token", True), ("bos_token", False)):
        other = word_level(tmp_path / role)
        file = tmp_path / role / "tokenizer_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), role: "again"}))
        draft = HuggingFaceTokenizer(other)
        assert (draft.sha256 == target.sha256) == same and 4 in draft.special_ids


def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(CheckpointError, match="no usable tokenizer") as caught:
        HuggingFaceTokenizer(Checkpoint("m", str(tmp_path)))
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)
