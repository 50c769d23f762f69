"""Counts a drafter's rounds on an answer that the target generated before.

The target's output does not depend on the draft: one answer and one draft at each of its positions give the rounds of a
deployment at every speculation length.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from tandem.runners.protocol import PrefillRow, ProposeRow, Runner, VerifyRow
from tandem.speculation.drafters import Drafter
from tandem.speculation.types import Draft, Proposer, Request, common


@dataclass(frozen=True, slots=True)
class PairCosts:
    """Seconds. verify[k]: a target step over k draft tokens; 0 is plain decoding.

    propose[k]: k draft tokens; empty without a draft model.
    """

    verify: Mapping[int, float]
    propose: Mapping[int, float]

    @property
    def draft_step(self) -> float | None:
        """Seconds of a further draft token: the slope over lengths, or the only step."""
        if not self.propose:
            return None
        first, last = min(self.propose), max(self.propose)
        rise = self.propose[last] - self.propose[first]
        return rise / (last - first) if last > first else self.propose[first] / first

    @property
    def ratio(self) -> float | None:
        """A draft step over a plain target step; None without a draft or if the step took no time."""
        return None if self.draft_step is None or not self.verify[0] else self.draft_step / self.verify[0]


def measure_costs(
    models: tuple[Runner, Runner | None],
    adapters: tuple[int, int],
    request: Request,
    longest: int,
    context: int,
    repeats: int,
) -> PairCosts:
    """Times steps of a sequence of `context` tokens in slot 0. `models`, `adapters`: of target and draft."""
    (target, draft), (of_target, of_draft) = models, adapters
    tokens = tuple(i % target.limits.vocab_size for i in range(context))
    steps: dict[tuple[str, int], Callable[[], object]] = {}
    _prefill(target, tokens, of_target)
    for k in range(longest + 1):
        row = VerifyRow(0, context - 1, tokens[-1], tokens[:k], request, adapter=of_target)
        steps["verify", k] = partial(target.verify, [row])
    if draft:
        _prefill(draft, tokens, of_draft)
        for k in range(1, longest + 1):
            drafted = ProposeRow(0, context - 1, tokens[-2:], k, request, adapter=of_draft)
            steps["propose", k] = partial(draft.propose, [drafted])
    taken = _in_turn(steps, repeats)
    seconds = {name: statistics.median(times) for name, times in taken.items()}
    return PairCosts(*({k: s for (kind, k), s in seconds.items() if kind == name} for name in ("verify", "propose")))


def _prefill(runner: Runner, tokens: tuple[int, ...], adapter: int) -> None:
    chunk = runner.limits.chunk
    for start in range(0, len(tokens) - 1, chunk):
        runner.prefill([PrefillRow(0, start, tokens[start : min(start + chunk, len(tokens) - 1)], adapter)])


def _in_turn(steps: Mapping[tuple[str, int], Callable[[], object]], repeats: int) -> dict[tuple[str, int], list[float]]:
    # In turn, so that a busy moment of the machine affects all kinds.
    taken: dict[tuple[str, int], list[float]] = {name: [] for name in steps}
    for step in steps.values():
        step()
    for _ in range(repeats):
        for name, step in steps.items():
            started = time.perf_counter()
            step()
            taken[name].append(time.perf_counter() - started)
    return taken


@dataclass(frozen=True, slots=True)
class Continuation:
    """A prompt and the target's answer."""

    kind: str
    prompt: tuple[int, ...]
    answer: tuple[int, ...]

    def texts(self) -> list[tuple[int, ...]]:
        """The tokens before each of the answer's."""
        return [self.prompt + self.answer[:at] for at in range(len(self.answer))]


@dataclass(slots=True)
class RoundFigures:
    """Rounds of a drafter at one speculation length, over all prompts.

    `by_position`: rounds that accepted draft token i. `model_rounds`: rounds in which the model drafted.
    """

    rounds: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    by_position: list[int] = field(default_factory=list)
    model_rounds: int = 0

    def add(self, answer: Sequence[int], drafts: Sequence[Draft], k: int) -> None:
        """Adds a deployment's rounds of `k`; `drafts`: of each position."""
        self.by_position += [0] * (k - len(self.by_position))
        at = 0
        while at < len(answer):
            draft = drafts[at].token_ids[: min(k, len(answer) - at - 1)]
            right = common(draft, answer[at:])
            self.rounds, self.tokens = self.rounds + 1, self.tokens + right + 1
            self.drafted, self.accepted = self.drafted + len(draft), self.accepted + right
            self.model_rounds += Proposer.MODEL in drafts[at].proposed_by[: len(draft)]
            for position in range(right):
                self.by_position[position] += 1
            at += right + 1

    @property
    def tokens_per_round(self) -> float:
        """Mean, with the target's own token; 0 without rounds."""
        return self.tokens / self.rounds if self.rounds else 0.0

    def speedup(self, costs: PairCosts, k: int) -> float:
        """Predicted over plain decoding from step costs alone; 1 if steps took no time."""
        step = costs.verify[k] + (costs.propose[k] * self.model_rounds / self.rounds if self.model_rounds else 0.0)
        return self.tokens_per_round * costs.verify[0] / step if step else 1.0


@dataclass(slots=True)
class Agreement:
    """Tokens, and those whose draft begins with the right one."""

    agreed: int = 0
    tokens: int = 0

    def add(self, answer: Sequence[int], drafts: Sequence[Draft]) -> None:
        self.tokens += len(answer)
        self.agreed += sum(draft.token_ids[:1] == (token,) for draft, token in zip(drafts, answer, strict=True))


async def drafts_of(drafter: Drafter, continuation: Continuation, k: int) -> list[Draft]:
    """Drafts `k` tokens before each token of the answer."""
    await drafter.open(continuation.prompt)
    try:
        return [await drafter.propose(text, k) for text in continuation.texts()]
    finally:
        await drafter.close()
