"""Calls of tools in models' own formats: read however the text comes, shown, and enforced where one begins."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tandem.checkpoints.tool_prompts import INTRODUCTION, with_tools
from tandem.engine.structures import Structures
from tandem.runners.toy import VOCAB_SIZE, ToyTokenizer
from tandem.services.http.tool_calls import FORMATS, MarkedCalls
from tandem.services.http.tools import ToolUse, folded
from tandem.speculation.types import InvalidField
from tests.support import run

TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"properties": {"a": {"type": "integer"}}, "required": ["a"]}},
}
ADD = ("add", {"a": 1})
# As the cards of the models and their tokenizers show them.
OUTPUTS: list[tuple[str, str, Any]] = [
    ("hermes", 'So:<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>', ("So:", [ADD])),
    ("hermes", "a <tool_call>x</tool_call> b", ("a <tool_call>x</tool_call> b", [])),
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
    (system, user, assistant, answers, last), tools = with_tools("", history, [TOOL], system=True)
    assert tools is None and system["role"] == "system" and INTRODUCTION in system["content"]
    assert assistant["content"].count('{"name": "add", "arguments": {"a": 1}}') == 2 and "tool_calls" not in assistant
    assert answers["role"] == "user" and answers["content"].count("<tool_response>") == 2
    assert (user, last) == (history[0], history[-1])
    shown, _ = with_tools("", history, [TOOL], system=False)
    assert [each["role"] for each in shown] == ["user", "assistant", "user", "user"]
    assert shown[0]["content"].startswith("# Tools") and shown[0]["content"].endswith("\n\nu")
    knows = "tools tool_calls <tool_call>"
    assert with_tools(knows, history, [TOOL], system=True) == (history, [TOOL])


def test_from_where_a_call_begins_the_output_matches_its_schema() -> None:
    async def test() -> None:
        structures = Structures(ToyTokenizer(), VOCAB_SIZE)
        structure = ToolUse((TOOL,), "auto").structure
        assert structure
        good = 'Any <text> "b.<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call> and'
        for text in ("", "<tool", good, good + good):
            await structures.matcher(structure, list(text.encode()))
        for text in ('<tool_call>{"name": "sub"', '<tool_call>{"name": "add", "arguments": {"a": "', "<tool_call>x"):
            with pytest.raises(InvalidField, match="does not match"):
                await structures.matcher(structure, list(text.encode()))

    run(test())
