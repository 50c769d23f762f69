"""DraftSession: the caller's own drafter against a toy TargetVerifier."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeVar

import pytest

import tandem
from tests.support import GREEDY, oracle, run, target_site, toy
from tests.toy import ToyConfig, toy_logits

T = TypeVar("T")
PROMPT = b"drafts of my own"
SAID = oracle(PROMPT, GREEDY, 20)


class Oracle:
    """Proposes what the target will say, but for every `wrong`-th token."""

    def __init__(self, wrong: int = 0) -> None:
        self.wrong, self.asked = wrong, 0

    def propose(self, tokens: Sequence[int], k: int) -> list[int]:
        self.asked += 1
        seen = list(tokens)
        for _ in range(k):
            token = int(toy_logits(seen, ToyConfig()).argmax())
            seen.append((token + 1) % 256 if self.wrong and len(seen) % self.wrong == 0 else token)
        return seen[len(tokens) :]


class Bytes:
    """The toy target's tokenizer, as a caller would write it."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(token for token in token_ids if token < 256).decode("latin-1")


class TooMany:
    """Proposes more than it is asked for."""

    def propose(self, tokens: Sequence[int], k: int) -> Sequence[int]:
        return (1,) * (k + 1)


def with_target(ask: Callable[[str], T], config: ToyConfig | None = None) -> T:
    async def test() -> T:
        async with target_site(toy(config)) as site:
            found = await asyncio.to_thread(ask, site.address)
            assert site.free == 4, "every session was closed"
            return found

    return run(test())


@pytest.mark.parametrize("wrong", [0, 3])
def test_the_output_is_the_targets_whatever_is_drafted(wrong: int) -> None:
    drafter = Oracle(wrong)

    def ask(address: str) -> tandem.Completion:
        with tandem.DraftSession(address, drafter) as session:
            return session.generate(list(PROMPT), max_new_tokens=20)

    completion = with_target(ask)
    assert completion.token_ids == SAID and completion.text == ""
    assert (completion.prompt_tokens, completion.output_tokens) == (len(PROMPT), 20)
    statistics = completion.statistics
    assert statistics.accepted > 0 and statistics.rounds < 20
    assert (statistics.accepted == statistics.drafted) is (wrong == 0)
    assert drafter.asked <= statistics.rounds + 1 and statistics.draft_seconds > 0


def test_text_needs_a_tokenizer_and_streams_with_one() -> None:
    def ask(address: str) -> tuple[str, tandem.Completion]:
        with tandem.DraftSession(address, Oracle()) as session, pytest.raises(ValueError, match="tokenizer"):
            session.generate("text")
        with tandem.DraftSession(address, Oracle(), tokenizer=Bytes()) as session:
            chunks = list(session.stream(PROMPT.decode(), max_new_tokens=20))
            return "".join(chunk.text for chunk in chunks), session.generate(PROMPT.decode(), max_new_tokens=20)

    text, completion = with_target(ask)
    assert text == completion.text == Bytes().decode(SAID)


def test_a_drafter_that_is_wrong_about_its_contract_is_told() -> None:
    def ask(address: str) -> None:
        with tandem.DraftSession(address, TooMany()) as session, pytest.raises(tandem.TandemError, match="at most"):
            session.generate(list(PROMPT), max_new_tokens=20)

    with_target(ask)


def test_a_length_above_the_targets_maximum_is_refused() -> None:
    def ask(address: str) -> None:
        with pytest.raises(ValueError, match="speculation_length: 6"):
            tandem.DraftSession(address, Oracle(), speculation_length=6)

    with_target(ask)


def test_a_deadline_and_a_target_that_is_not_there() -> None:
    def ask(address: str) -> None:
        with tandem.DraftSession(address, Oracle(1), retry_seconds=0.0) as session:
            with pytest.raises(tandem.TandemError) as late:
                session.generate(list(PROMPT), max_new_tokens=100, timeout=0.3)
            assert late.value.code == "DEADLINE_EXCEEDED"

    with_target(ask, ToyConfig(step_seconds=0.05))
    with pytest.raises(tandem.TandemError):
        tandem.DraftSession("127.0.0.1:1", Oracle(), wait_seconds=0.2)
