"""Log-probabilities of tokens from the target's raw logits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from tandem.speculation.draws import largest
from tandem.speculation.elementary import exp, log, total
from tandem.speculation.types import TokenLogprobs

Logits = NDArray[np.float32]
# `all_logprobs`, or a runner's faster one for all its rows
LogprobsOf = Callable[[Sequence[Logits], Sequence[int], int], tuple[TokenLogprobs, ...]]


def all_logprobs(logits: Sequence[Logits], tokens: Sequence[int], top: int) -> tuple[TokenLogprobs, ...]:
    return tuple(token_logprobs(row, token, top) for row, token in zip(logits, tokens, strict=True))


def token_logprobs(logits: Logits, token: int, top: int) -> TokenLogprobs:
    """Returns log-softmax of logits, float32 [vocabulary], at `token` and the `top` largest; its sum has one order."""
    most = float(logits.max())
    ids = largest(logits, min(top, len(logits))).tolist() if top else []
    return reported(logits, token, ids, most + float(log(total(exp(logits.astype(np.float64) - most)))))


def reported(logits: Logits, token: int, ids: Iterable[int], log_total: float) -> TokenLogprobs:
    """Returns log-probabilities of `token` and `ids`, given log(sum(exp(logits)))."""
    return TokenLogprobs(
        float(logits[token]) - log_total, tuple((each, float(logits[each]) - log_total) for each in ids)
    )
