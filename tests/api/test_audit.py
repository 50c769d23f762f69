"""DraftSession has rounds of its target verified again, here or at a second target, and says what it found."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import pytest

from tandem import DraftSession, SamplingParams, TandemError
from tandem.runners.toy import ToyConfig, ToyRunner
from tandem.speculation.errors import InvalidField, WrongType
from tests.support import GREEDY, SAMPLED, oracle, run, target_site, toy

T = TypeVar("T")
PROMPT = b"again and again and "
PENALISED = SamplingParams(temperature=0.9, seed=3, presence_penalty=1.0, repetition_penalty=1.3)


class Repeat:
    def propose(self, tokens: Sequence[int], k: int) -> Sequence[int]:
        return list(tokens[-1:]) * k


class Liar(ToyRunner):
    """Says it is the toy target, but from position 30 on says what another model does."""

    def logits(self, slot: int, position: int) -> Any:
        if position < 30:
            return super().logits(slot, position)
        honest, self.config = self.config, ToyConfig(salt=1)
        try:
            return super().logits(slot, position)
        finally:
            self.config = honest


def audited(target: ToyRunner, auditor: ToyRunner | str, work: Callable[[DraftSession], T], audit: float = 1.0) -> T:
    async def test() -> T:
        async with (
            target_site(target) as site,
            target_site(auditor if isinstance(auditor, ToyRunner) else toy()) as other,
        ):
            address = other.address if isinstance(auditor, ToyRunner) else auditor

            def session() -> T:
                with DraftSession(site.address, Repeat(), audit=audit, auditor=address) as found:
                    return work(found)

            return await asyncio.to_thread(session)

    return run(test())


@pytest.mark.each_value
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, PENALISED], ids=["greedy", "sampled", "penalised"])
@pytest.mark.parametrize("where", ["second target", "here"])
@pytest.mark.parametrize("share", [1.0, 0.3])
def test_an_honest_target_s_rounds_are_verified_again_with_the_same_tokens(
    sampling: SamplingParams, where: str, share: float
) -> None:
    def work(session: DraftSession) -> None:
        for seed in range(3):
            session.generate([*PROMPT, seed], sampling, max_new_tokens=40)
        found = session.audited
        assert found.wrong == [] and found.failed == 0 and found.same_arithmetic
        assert found.rounds > 50 and 0 < found.audited <= found.rounds
        assert (found.audited == found.rounds) == (share == 1)

    audited(toy(), toy() if where == "second target" else "salt=0", work, share)


@pytest.mark.parametrize("where", ["second target", "here"])
def test_a_target_that_says_what_another_model_does_is_found_at_the_position(where: str) -> None:
    def work(session: DraftSession) -> None:
        said = session.generate(list(PROMPT), SAMPLED, max_new_tokens=60).token_ids
        true = oracle(PROMPT, SAMPLED, 60)
        first = next(i for i, pair in enumerate(zip(said, true, strict=False)) if pair[0] != pair[1])
        assert session.audited.wrong[0].position == len(PROMPT) + first
        assert session.audited.audited == session.audited.rounds

    audited(toy(kind=Liar), toy() if where == "second target" else "salt=0", work)


def test_an_auditor_of_another_model_is_refused_and_one_that_fails_ends_no_request() -> None:
    with pytest.raises(InvalidField, match="auditor: its weights_revision is"):
        audited(toy(), toy(ToyConfig(salt=1)), lambda session: None)

    def work(session: DraftSession) -> None:
        said = session.generate(list(PROMPT), SAMPLED, max_new_tokens=30).token_ids
        assert said == oracle(PROMPT, SAMPLED, 30)
        assert session.audited.failed > 0 and session.audited.wrong == []

    audited(toy(), toy(ToyConfig(fails=3)), work)


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"audit": 1.5, "auditor": "h:1"}, InvalidField, "audit: 1.5 is outside 0 to 1"),
        ({"audit": float("nan"), "auditor": "h:1"}, InvalidField, "audit: nan is outside 0 to 1"),
        ({"audit": "all", "auditor": "h:1"}, WrongType, "audit must be a number from 0 to 1"),
        ({"audit": 0.1}, InvalidField, "auditor: give audit and auditor together"),
        ({"auditor": "h:1"}, InvalidField, "auditor: give audit and auditor together"),
        ({"audit": 0.1, "auditor": 7}, WrongType, "auditor must be a string"),
    ],
)
def test_what_cannot_audit_is_refused_before_any_call(options: dict[str, Any], error: Any, said: str) -> None:
    with pytest.raises(error, match=said) as caught:
        DraftSession("127.0.0.1:9", Repeat(), **options)
    assert isinstance(caught.value, TandemError)
