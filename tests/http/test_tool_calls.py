"""Calls of tools in models' own formats: read however the text comes, shown, and enforced where one begins."""

from __future__ import annotations

import functools
import json
import re
from typing import Any

import pytest

from tandem.checkpoints.chat_templates import render
from tandem.checkpoints.tokenizers import ByteText
from tandem.checkpoints.tool_prompts import format_of, forms
from tandem.engine.structures import Structures
from tandem.services.http.constraints import ToolUse
from tandem.services.http.tool_calls import FORMATS, MarkedCalls, MarkedText, folded
from tandem.speculation.draws import StructureFailed
from tandem.speculation.stopping import Stopping
from tandem.speculation.types import InvalidField
from tests.toy import VOCAB_SIZE, ToyTokenizer

TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"properties": {"a": {"type": "integer"}}, "required": ["a"]}},
}
ADD = ("add", {"a": 1})
# As the cards of the models and their tokenizers show them.
OUTPUTS: list[tuple[str, str, Any]] = [
    ("hermes", 'So:<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>', ("So:", [ADD])),
    ("hermes", "a <tool_call>[]</tool_call> b", ("a <tool_call>[]</tool_call> b", [])),
    ("hermes", '<tool_call>\n{"name": "sub", "arguments": {}}</tool_call>', (None, [])),
    ("llama3", '{"name": "add", "parameters": {"a": 1}}', (None, [ADD])),
    ("llama3", '<|python_tag|>{"name": "add", "parameters": {"a": 1}}; {"name": "add"}', (None, [ADD, ("add", {})])),
    ("llama3", '{"a": 1} is JSON', ('{"a": 1} is JSON', [])),
    ("llama3", 'Say {"name": "add"}', ('Say {"name": "add"}', [])),
    ("mistral", '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}]', (None, [ADD])),
    ("mistral", 'Well.[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]add{"a": 1}', ("Well.", [ADD, ADD])),
    ("mistral", '[TOOL_CALLS]add[CALL_ID]123456789[ARGS]{"a": 1}', (None, [ADD])),
    (
        "deepseek",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"
        '{"a": 1}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        (None, [ADD]),
    ),
    (
        "deepseek",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        (None, [ADD]),
    ),
]


def parsed(form: str, text: str, size: int, cut: bool = False) -> dict[str, Any]:
    parser, deltas = MarkedCalls(FORMATS[form], frozenset({"add"})), []
    for i in range(0, len(text), size):
        deltas += parser.add(text[i : i + size])
    return folded([*deltas, *parser.end(cut)])


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(("form", "text", "wanted"), OUTPUTS)
def test_calls_are_read_in_the_models_own_format_however_the_text_comes(
    form: str, text: str, wanted: Any, size: int
) -> None:
    message = parsed(form, text, size)
    calls = [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in message.get("tool_calls", [])]
    content, expected = wanted
    assert calls == expected
    assert message["content"] == (content if calls or content else text)
    ids = [each["id"] for each in message.get("tool_calls", [])]
    assert all(len(each) == 9 and each.isalnum() for each in ids) or form != "mistral"


@pytest.mark.parametrize(("form", "text", "wanted"), [each for each in OUTPUTS if each[2][1] and each[2][1][0] == ADD])
def test_a_call_that_is_cut_is_never_text(form: str, text: str, wanted: Any) -> None:
    first = text.index("1")
    for end in range(first, first + 2):
        message = parsed(form, text[:end], 2, cut=True)
        assert message["content"] == (wanted[0] if "tool_calls" in message else wanted[0] or "")


def test_ids_of_other_servers_are_shown_to_mistral_in_nine_characters_alike() -> None:
    calls = {"role": "assistant", "content": "", "tool_calls": [{"id": "call_abc", "function": {}}]}
    answer = {"role": "tool", "content": "4", "tool_call_id": "call_abc"}
    shown = FORMATS["mistral"].shown(calls)["tool_calls"][0]["id"]
    assert len(shown) == 9 and FORMATS["mistral"].shown(answer)["tool_call_id"] == shown
    assert FORMATS["mistral"].shown({**answer, "tool_call_id": "abcdefgh1"})["tool_call_id"] == "abcdefgh1"
    assert FORMATS["hermes"].shown(calls) is calls


def test_a_template_without_tools_or_calls_leaves_out_no_turn() -> None:
    call = {"function": {"name": "add", "arguments": {"a": 1}}}
    history = [
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "x", "tool_calls": [call, call]},
        {"role": "tool", "content": "2"},
        {"role": "tool", "content": "3"},
        {"role": "user", "content": "v"},
    ]
    ways = [*forms("", history, [TOOL])]
    (system, user, assistant, answers, last), tools = ways[0]
    assert tools is None and system["role"] == "system" and "# Tools" in system["content"]
    assert assistant["content"].count('{"name": "add", "arguments": {"a": 1}}') == 2 and "tool_calls" not in assistant
    assert answers["role"] == "user" and answers["content"].count("<tool_response>") == 2
    assert (user, last) == (history[0], history[-1])
    shown, _ = ways[-1]
    assert [each["role"] for each in shown] == ["user", "assistant", "user"]
    assert shown[0]["content"].startswith("# Tools") and shown[0]["content"].endswith("\n\nu")
    assert next(forms("hermes", history, [TOOL])) == (history, [TOOL])


LOOP = "{{ tools }}{% for m in messages %}<{{ m.role }}>"
EACH = "{{ m.content }}{% for c in m.tool_calls or () %}<tool_call>\n"
JSON_CALLS = (
    EACH + """{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}{% endfor %}"""
)
MISTRAL = "{% if m.tool_calls %}[TOOL_CALLS]{{ m.tool_calls | tojson }}{% else %}{{ m.content }}{% endif %}{% endfor %}"
TEMPLATES = {
    "of ChatML": (LOOP + "{{ m.content }}{% endfor %}", ""),
    "of Qwen 2.5": (LOOP + JSON_CALLS + "{% endfor %}", "hermes"),
    "with XML in the marks": (
        LOOP + EACH + "<function={{ c.function.name }}>{% endfor %}{% endfor %}",
        "",
    ),
    "of Mistral": (LOOP + MISTRAL, "mistral"),
    "without answers": (LOOP + "{% if m.role != 'tool' %}" + JSON_CALLS + "{% endif %}{% endfor %}", ""),
    "that refuses": ("{{ raise_exception('no') }}", ""),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_is_tried_for_what_it_shows(name: str) -> None:
    template, wanted = TEMPLATES[name]
    assert format_of(template, functools.partial(render, template)) == wanted


@pytest.mark.parametrize("sizes", [[99], [1] * 99, [2, 1] * 40, [3] * 40])
def test_marks_that_are_special_tokens_stand_in_the_text_alike_wherever_rounds_end(sizes: list[int]) -> None:
    marks = {1000: "<tool_call>", 1001: "</tool_call>"}
    body = '{"name": "add", "arguments": {"a": 1}}'
    cut = "é".encode()

    def spelt(token: int) -> bytes:
        return bytes([token] if token < 256 else [])

    for before, stops, wanted in (([*b"a", *cut], (), "aé"), ([*b"a", cut[0]], (), "a"), ([*b"a\n"], ("\n\n",), "a\n")):
        tokens = [*before, 1000, *body.encode(), 1001, *b" ."]
        text = ByteText(lambda t: bytes([t] if t < 256 else []))
        stopping = Stopping(text, len(tokens), stop_strings=stops)
        marked = MarkedText(ByteText(lambda t: bytes([t] if t < 256 else [])), marks)
        parser, deltas, at = MarkedCalls(FORMATS["hermes"], frozenset({"add"})), [], 0
        for size in sizes:
            if at < len(tokens):
                deltas += parser.add(marked.text(stopping.push(tokens[at : at + size])))
                at += size
        message = folded([*deltas, *parser.end(cut=True)])
        assert [each["function"]["arguments"] for each in message["tool_calls"]] == ['{"a":1}']
        assert message["content"].startswith(wanted) and "tool_call" not in message["content"]
        assert message["content"].endswith(".")


async def test_from_where_a_call_begins_the_output_matches_its_schema() -> None:
    structures = Structures(ToyTokenizer(), VOCAB_SIZE)
    structure = ToolUse((TOOL,), "auto").structure
    assert structure
    good = 'Any <text> "b.<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call> and'
    compact = good.replace(": ", ":").replace(", ", ",")
    for text in ("", "<tool", good, compact, good + compact):
        await structures.matcher(structure, list(text.encode()))
    for text in ('<tool_call>{"name": "sub"', '<tool_call>{"name": "add", "arguments": {"a": "', "<tool_call>x"):
        with pytest.raises(InvalidField, match="does not match"):
            await structures.matcher(structure, list(text.encode()))


STRING = {"type": "string"}


@pytest.mark.parametrize(
    ("parameters", "good", "bad", "place"),
    [
        ({"properties": {"t": {"type": "array", "uniqueItems": True}}}, '{"t": [1]}', '{"t":[1,1]}', "$.t: [1, 1]"),
        (
            {"additionalProperties": STRING, "dependentRequired": {"a": ["b"]}},
            '{"a": "<tool_call>{", "b": ""}',
            '{"a": "x"}',
            "$: 'b' is a dependency of 'a'",
        ),
    ],
)
async def test_what_a_grammar_cannot_say_of_arguments_is_checked_as_soon_as_the_call_is_complete(
    parameters: dict[str, Any], good: str, bad: str, place: str
) -> None:
    functions = {"f.g": {"type": "object", **parameters}, "now": {"type": "object", "properties": {}}}
    tools = tuple({"function": {"name": name, "parameters": its}} for name, its in functions.items())
    begin = '<tool_call>\n{"name": "f.g", "arguments": '
    structures = Structures(ToyTokenizer(), VOCAB_SIZE)
    structure = ToolUse(tools, "auto").structure
    assert structure
    text = f"So: {begin}{good}}}\n</tool_call>\n{begin}"
    matcher = await structures.matcher(structure, list(text.encode()))
    assert matcher.mask().any()
    for byte in f"{bad}}}".encode():
        assert matcher.allows(byte) and matcher.advance(byte)
    with pytest.raises(StructureFailed, match=re.escape(f"the output breaks it at tools.f.g: {place}")):
        matcher.mask()
