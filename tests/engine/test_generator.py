"""From request to completion: checks before work, stops over the wire, margins."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from tandem.engine.batcher import Batcher
from tandem.engine.engine import Engine
from tandem.engine.generator import Generator
from tandem.engine.generators import fused_generator, plain_generator
from tandem.engine.load_models import Loaded
from tandem.engine.model_config import DraftChoice
from tandem.runners.protocol import Limits
from tandem.speculation.types import FinishReason, GenerationRequest, InvalidField, TooLong
from tests.support import GREEDY, answer, fused_site, ids, oracle, run, target_site, toy, worker_site
from tests.toy import ToyConfig, ToyTokenizer

PROMPT = b"abc"
TRUTH = oracle(PROMPT, GREEDY, 40)
TEXT = "".join(bytes([t]).decode("latin-1") for t in TRUTH if t < 256)
SERVICES = ("autoregressive", "fused", "draft_worker")


def plain() -> Generator:
    return plain_generator(Loaded(Engine(toy(max_length=32), Batcher("test")), ToyTokenizer()))


async def ask(service: str, request: GenerationRequest) -> Any:
    """The answer over the wire."""
    if service == "fused":
        async with fused_site(toy(), toy(ToyConfig(miss=0.2))) as site, site.client() as client:
            return await answer(client.generate, request)
    async with target_site() as target:
        if service == "autoregressive":
            async with target.client() as client:
                return await answer(client.generate, request)
        async with worker_site(target.address, "miss=0.2") as site, site.client() as client:
            return await answer(client.generate, request)


# --- checks ---


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (ids([]), "prompt"),
        (ids([258]), "prompt"),
        (GenerationRequest(text=""), "prompt"),
        (ids([1], stop_token_ids=(258,)), "stop_token_ids"),
    ],
)
def test_a_request_that_cannot_be_is_refused_before_any_slot_is_taken(request_: GenerationRequest, field: str) -> None:
    generator = plain()
    with pytest.raises(InvalidField) as caught:
        run(answer(generator.generate, request_))
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("length", "changes", "named"),
    [
        (32, {}, "32.*32"),
        (40, {}, "40.*32"),
        (30, {"count": 3}, "30.*3.*32"),
        (10, {"max_total_tokens": 10}, "10.*10"),
        (10, {"max_total_tokens": 33}, "33.*32"),
    ],
)
def test_what_does_not_fit_is_too_long(length: int, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(TooLong, match=named):
        run(answer(plain().generate, ids([1] * length, **({"count": None} | changes))))


def test_a_chat_without_a_template_names_the_field() -> None:
    class Plain(ToyTokenizer):
        def encode(self, text: str, chat: bool) -> list[int]:
            raise ValueError("chat: this model has no chat template")

    generator = replace(plain(), tokenizer=Plain())
    with pytest.raises(InvalidField, match=r"^chat: this model has no chat template$") as caught:
        run(answer(generator.generate, GenerationRequest(text="hi", chat=True)))
    assert caught.value.field == "chat"


# --- stops, over the wire ---


@pytest.mark.parametrize("service", SERVICES)
def test_a_stop_string_ends_the_text_before_it_and_the_ids_with_the_token_that_completes_it(service: str) -> None:
    at = 12
    stop = TEXT[at : at + 3]
    assert TEXT.find(stop) == at
    got = run(ask(service, ids(PROMPT, 40, stop_strings=(stop, "never said"))))
    assert got.completion.finish_reason is FinishReason.STOP_STRING
    assert got.text == TEXT[:at]
    assert got.token_ids == TRUTH[: at + 3]


def test_a_fused_pair_of_other_tokenizers_is_refused() -> None:
    class Other(ToyTokenizer):
        sha256 = "other"

    batcher = Batcher("test")
    target, draft = Loaded(Engine(toy(), batcher), ToyTokenizer()), Loaded(Engine(toy(), batcher), Other())
    with pytest.raises(ValueError, match="vocabulary"):
        fused_generator(target, draft, 5, DraftChoice("model"))
    asyncio.run(batcher.close())


@pytest.mark.parametrize(
    ("limits", "names"),
    [
        ((0, 8, 2, 4, 9), "batch: 0"),
        ((1, 1, 0, 4, 9), "sequence_length: 1"),
        ((1, 8, 8, 4, 9), "speculation_length: 8"),
        ((1, 8, 2, 0, 9), "chunk: 0"),
        ((1, 800, 257, 4, 9), "speculation_length: 257 is above 256"),
    ],
)
def test_limits_that_cannot_be_are_refused_by_name(limits: tuple[int, ...], names: str) -> None:
    with pytest.raises(ValueError, match=names):
        Limits(*limits)
