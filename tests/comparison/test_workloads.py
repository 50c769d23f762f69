"""What is compared: the built-in prompts and the user's, and conditions, a star around the base."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.comparison.links.link_settings import LinkSettings
from tandem.comparison.measuring.architectures import plan
from tandem.comparison.measuring.workloads import built_in_prompts, read_prompt_file
from tandem.speculation.types import GenerationRequest, Rule, SamplingParams


def test_every_workload_has_at_least_four_prompts_with_names_of_their_own() -> None:
    prompts = built_in_prompts()
    for kind in ("counting_and_lists", "code", "extraction", "chat", "prose"):
        assert sum(prompt.kind == kind for prompt in prompts) >= 4
    assert len({prompt.name for prompt in prompts}) == len(prompts)
    assert len({prompt.text for prompt in prompts}) == len(prompts)


def test_every_non_empty_line_of_a_prompt_file_is_a_prompt(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("\ufeffI believe\n\n   \n  the meaning of life  \r\n", encoding="utf-8")
    found = read_prompt_file(path)
    assert [prompt.text for prompt in found] == ["I believe", "the meaning of life"]
    assert [prompt.name for prompt in found] == ["prompts.txt:1", "prompts.txt:4"]
    assert {(prompt.kind, prompt.chat) for prompt in found} == {("file", True)}


def test_a_prompt_file_that_is_missing_empty_or_not_text_is_named(tmp_path: Path) -> None:
    empty, binary = tmp_path / "empty.txt", tmp_path / "binary.txt"
    empty.write_text(" \n\n")
    binary.write_bytes(b"\xff\xfe\x00")
    for path, message in (
        (tmp_path / "absent.txt", "does not exist"),
        (empty, "is empty"),
        (binary, "is not UTF-8 text"),
        (tmp_path, "cannot be read"),
    ):
        with pytest.raises(ValueError, match=message) as caught:
            read_prompt_file(path)
        assert str(path) in str(caught.value)


def names(*args, **settings) -> list[str]:  # type: ignore[no-untyped-def]
    return [condition.name for condition in plan(*args, **settings)]


def asked(**sampling: float) -> GenerationRequest:
    return GenerationRequest(text="", sampling=SamplingParams(**sampling))  # type: ignore[arg-type]


def test_links_and_sampling_are_varied_one_at_a_time() -> None:
    found = plan(
        asked(temperature=0.5, seed=7),
        [LinkSettings(rtt, 100.0) for rtt in (0.0, 20.0)],
        (0.5, 1.0),
        (Rule.AGREEMENT, Rule.REJECTION),
    )
    assert [condition.name for condition in found] == [
        "base",
        "RTT 20 ms, 100 Mbit/s",
        "temperature 0.5, rejection",
        "temperature 1, agreement",
        "temperature 1, rejection",
    ]
    assert [condition.varies for condition in found] == ["base", "link", "sampling", "sampling", "sampling"]
    assert {condition.link for condition in found if condition.varies == "sampling"} == {LinkSettings(0.0, 100.0)}
    assert {condition.request.sampling.seed for condition in found} == {7}


def test_greedy_tokens_are_the_same_under_every_rule_so_one_is_measured() -> None:
    found = names(asked(), temperatures=(0.0, 0.8), rules=(Rule.AGREEMENT, Rule.REJECTION))
    assert found == ["base", "temperature 0.8, agreement", "temperature 0.8, rejection"]
