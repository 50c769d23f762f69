"""What is varied: a star around the base."""

from __future__ import annotations

from tandem.comparison.links.link_settings import LinkSettings
from tandem.comparison.measuring.conditions import plan
from tandem.speculation.types import GenerationRequest, Rule, SamplingParams


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
