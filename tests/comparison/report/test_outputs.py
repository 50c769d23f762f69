"""Answers side by side: one text where all are the same, and a mark where one first differs."""

from __future__ import annotations

from typing import Any

from tandem.comparison.report.blocks import Details, Outputs
from tandem.comparison.report.html import html
from tandem.comparison.report.markdown import markdown
from tandem.comparison.report.outputs import answers
from tandem.comparison.report.sections import report_of
from tests.comparison.report.example_comparison import example

PLAIN = ([5, 6, 7], "The sky is blue.")


def answered(*texts: tuple[str, list[int], str], prompts: int = 1, rule: str = "agreement") -> dict[str, Any]:
    """A comparison whose architectures gave these tokens and texts to every prompt."""
    found = example()
    found["conditions"] = found["conditions"][:1]
    found["conditions"][0]["rule"] = rule
    found["records"] = [
        {"condition": "base", "architecture": name, "prompt": f"p/{i}", "workload": "p", "run": 0, "error": None,
         "output_token_ids": tokens, "text": text}
        for i in range(prompts) for name, tokens, text in texts
    ]  # fmt: skip
    return found


def shown(found: dict[str, Any]) -> list[Outputs]:
    return [block for block in answers(found) if isinstance(block, Outputs)]


def page(found: dict[str, Any]) -> str:
    return html(report_of(found), {})


def test_an_answer_that_all_gave_is_shown_once() -> None:
    found = answered(("fused", *PLAIN), ("autoregressive", *PLAIN), ("distributed", *PLAIN))
    (outputs,) = shown(found)
    (answer,) = outputs.answers
    assert (answer.names, answer.before, answer.marked) == ("plain decoding, fused and distributed", PLAIN[1], "")
    assert outputs.said == "The same tokens from all." and page(found).count(PLAIN[1]) == 1


def test_the_first_word_that_differs_is_marked_beside_plain_decodings_answer() -> None:
    found = answered(("fused", [5, 6, 9, 8], "The sky is green today."), ("autoregressive", *PLAIN))
    (outputs,) = shown(found)
    plain, other = outputs.answers
    assert plain.names == "plain decoding" and plain.marked == ""
    assert (other.before, other.marked, other.after) == ("The sky is ", "green", " today.")
    assert other.note == "From position 2 on: token 9 in place of token 7."
    assert "The sky is <mark>green</mark> today." in page(found)
    assert "The sky is **green** today." in markdown(report_of(found), {})


def test_an_answer_that_ended_early_and_other_tokens_of_the_same_text_are_told_apart() -> None:
    found = answered(
        ("autoregressive", *PLAIN), ("fused", [5, 6], "The sky is"), ("distributed", [5, 6, 1, 2], PLAIN[1])
    )
    (outputs,) = shown(found)
    assert [answer.note for answer in outputs.answers[1:]] == [
        "From position 2 on: the end in place of token 7.",
        "From position 2 on: token 1 in place of token 7. The text is the same.",
    ]


def test_answers_that_differ_come_before_those_that_do_not_and_most_of_these_are_folded() -> None:
    found = answered(("autoregressive", *PLAIN), ("fused", *PLAIN), prompts=6)
    found["records"][-1] |= {"output_token_ids": [1], "text": "No."}
    blocks = answers(found)
    assert [block.title for block in shown(found)] == ["p/5", "p/0", "p/1", "p/2"]
    assert isinstance(blocks[-1], Details) and [block.title for block in blocks[-1].blocks] == ["p/3", "p/4"]


def test_an_answer_on_another_link_is_shown_only_where_it_differs() -> None:
    found = answered(("autoregressive", *PLAIN), ("fused", *PLAIN))
    found["conditions"].append({**found["conditions"][0], "name": "RTT 20 ms", "varies": "link"})
    away = [{**record, "condition": "RTT 20 ms"} for record in found["records"]]
    found["records"] += away
    assert [block.title for block in shown(found)] == ["p/0"]
    away[1] |= {"output_token_ids": [1], "text": "No."}
    assert [block.title for block in shown(found)] == ["p/0, RTT 20 ms", "p/0"]


def test_under_another_rule_texts_may_differ_and_that_is_said() -> None:
    (outputs,) = shown(answered(("autoregressive", *PLAIN), ("fused", [1], "No."), rule="rejection"))
    assert outputs.said == "2 different answers. Under the rule rejection the texts may differ."


def test_without_texts_there_is_no_section_of_answers() -> None:
    assert answers(example()) == [] and "What they answered" not in page(example())


def test_what_models_say_is_only_text() -> None:
    said = "<script>alert(1)</script>"
    shown_page = page(answered(("autoregressive", [1], said), ("fused", [2], f"{said}!")))
    assert "<script>" not in shown_page and shown_page.count("&lt;script&gt;") >= 2
