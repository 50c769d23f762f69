"""Patterns of modules match what PEFT's rule matches, and in steps that are counted, whatever they say."""

from __future__ import annotations

import random
import re

import pytest

from tandem.checkpoints import module_patterns
from tandem.checkpoints.module_patterns import MOST_STEPS, ModulePatterns

PATH = "model.layers.11.self_attn.q_proj"


def matches(pattern: str, path: str = PATH) -> bool:
    return ModulePatterns("rank_pattern", {pattern: True}).of(path, False)


def peft_matches(pattern: str, path: str = PATH) -> bool:
    """The rule of peft.utils.other.get_pattern_key."""
    return re.match(rf"(.*\.)?({pattern})$", path) is not None


@pytest.mark.parametrize(
    "pattern",
    [
        *("q_proj", "self_attn.q_proj", PATH, re.escape(PATH), f"^{PATH}$", r"layers\.(0|1|11)\.self_attn\.(q|k)_proj"),
        *(r".*\.[0-9]+\..*", r"layers\.\d{1,2}\..*", r"(model\.)?layers\.1{2}\..*_proj", r"[^x]*?q_proj", "(|.)q_proj"),
        *("_proj", "proj", "model", r"layers\.1\.self_attn\.q_proj", "^q_proj", r"(1|2)\.self_attn\.q_proj", "k_proj"),
        *(r"layers\.\d{3}\..*", "", "(?:q|)_proj", r"\w+", r"\.q_proj", "attn.q_proj", "q-proj", r"q\_proj"),
    ],
)
def test_patterns_of_real_adapters_match_as_pefts_rule_does(pattern: str) -> None:
    assert matches(pattern) == peft_matches(pattern)


def some_pattern(chance: random.Random, depth: int = 0) -> str:
    def inner() -> str:
        return some_pattern(chance, depth + 1)

    kind = chance.random() if depth < 6 else 1.0
    if kind > 0.6:
        return chance.choice(["a", "b", "ab", ".", r"\.", "[ab]", "[^a]", r"\w", r"\d", "0", "^", "$"])
    if kind > 0.4:
        return inner() + inner()
    if kind > 0.25:
        return f"({inner()}|{inner()})"
    times = chance.choice(["*", "+", "?", "{2}", "{1,2}", "{0,}", "*?", "??"])
    return f"(?:{inner()}){times}" if kind > 0.15 else chance.choice(["a", ".", "[ab]"]) + times


def test_patterns_match_as_pefts_rule_does_whatever_they_are_made_of() -> None:
    chance, found = random.Random(15), []
    while len(found) < 5000:
        pattern, path = some_pattern(chance), "".join(chance.choices("ab.0", k=chance.randrange(9)))
        try:
            found.append(peft_matches(pattern, path))
        except re.error:
            continue
        assert matches(pattern, path) == found[-1], (pattern, path)
    assert 500 < sum(found) < 4500, "the patterns say too little"


def test_the_first_pattern_that_matches_counts() -> None:
    ranks = ModulePatterns("rank_pattern", {"k_proj": 1, ".*_proj": 2, "q_proj": 3})
    assert [ranks.of(f"layers.0.{name}", 4) for name in ("q_proj", "k_proj", "norm")] == [2, 1, 4]


@pytest.mark.parametrize(
    ("pattern", "path"),
    [
        ("(a+)+", "a" * 60 + "!"),
        ("b(a+)+", "a" * 60),
        ("b(a|a)*", "a" * 60),
        ("b(a|aa)+", "a" * 60),
        ("b((((a*)*)*)*)*", "a" * 60),
        ("b" + "(a?)" * 60 + "a" * 60, "a" * 60),
        ("b" + ".*" * 200, "a" * 60),
    ],
)
def test_patterns_that_backtracking_never_ends_take_few_steps(pattern: str, path: str) -> None:
    patterns = ModulePatterns("rank_pattern", {pattern: True})
    assert not patterns.of(path, False)
    assert patterns.steps < 60 * len(path) * len(pattern)


def test_what_takes_too_many_steps_is_refused_however_many_modules_share_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module_patterns, "MOST_STEPS", 20_000)
    patterns = ModulePatterns("rank_pattern", {"b" + ".*" * 200: True})
    assert not patterns.of("a" * 30, False)
    with pytest.raises(ValueError, match="rank_pattern: its patterns take more than 20000 steps"):
        for n in range(20_000):
            patterns.of(f"{n}" + "a" * 30, False)
    for evil in ("((){999999}){999999}a", "((((a?){99}){99}){99}){99}"):
        with pytest.raises(ValueError, match="steps"):
            matches(evil, "aaa")


def test_a_path_has_a_length_too() -> None:
    with pytest.raises(ValueError, match="rank_pattern: a path of 513 characters"):
        matches("a", "a" * 513)


def test_each_linear_layer_of_a_model_of_405b_may_have_its_own_pattern() -> None:
    names = (*(f"self_attn.{name}_proj" for name in "qkvo"), *(f"mlp.{name}_proj" for name in ("gate", "up", "down")))
    paths = [f"model.layers.{layer}.{name}" for layer in range(126) for name in names]
    patterns = ModulePatterns("rank_pattern", {path: n for n, path in enumerate(paths)})
    assert [patterns.of(path, -1) for path in paths] == list(range(882))
    assert patterns.steps < MOST_STEPS / 1.9


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("(?=q)q_proj", "'?=q)q_proj' in it is not served"),
        ("(?i)q_proj", "'?i)q_proj' in it is not served"),
        ("(?P<x>q)_proj", "in it is not served"),
        (r"(q)\1", r"'\\1' in it is not served"),
        (r"\bq_proj", r"bq_proj' in it is not served"),
        ("a*+", "'*+' in it is not served"),
        ("a**", "in it is not served"),
        ("*a", "in it is not served"),
        ("^*", "in it is not served"),
        ("(a", "a group has no end"),
        ("a)", "')' in it is not served"),
        ("[z-a]", "bad character range"),
        ("[a", "in it is not served"),
        ("{2}", "in it is not served"),
        ("a\\", "in it is not served"),
        ("(" * 17 + ")" * 17, "in it is not served"),
        ("a" * 513, "longer than 512 characters"),
    ],
)
def test_what_could_only_be_matched_by_trying_is_refused_by_name(pattern: str, said: str) -> None:
    with pytest.raises(ValueError) as refused:
        matches(pattern)
    message = str(refused.value)
    assert said in message and message.startswith("rank_pattern: ") and len(message) < 200
