"""Computes log-probabilities of tokens from a row of the target's raw logits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from tandem.speculation.draws import largest
from tandem.speculation.elementary import exp, log, total
from tandem.speculation.types import TokenLogprobs

Logits = NDArray[np.float32]
LogprobsOf = Callable[[Sequence[Logits], Sequence[int], int], tuple[TokenLogprobs, ...]]
"""Computes `all_logprobs`; a runner may have a faster one, which it then uses for all its rows."""


def all_logprobs(logits: Sequence[Logits], tokens: Sequence[int], top: int) -> tuple[TokenLogprobs, ...]:
    """Returns `token_logprobs` of each of the rows and its token."""
    return tuple(token_logprobs(row, token, top) for row, token in zip(logits, tokens, strict=True))


def token_logprobs(logits: Logits, token: int, top: int) -> TokenLogprobs:
    """Returns the log-softmax of `logits`, float32 [vocabulary], at `token` and at the `top` largest.

    The sum has one order, so equal logits give equal bits.
    """
    most = float(logits.max())
    ids = largest(logits, min(top, len(logits))).tolist() if top else []
    return reported(logits, token, ids, most + float(log(total(exp(logits.astype(np.float64) - most)))))


def reported(logits: Logits, token: int, ids: Iterable[int], log_total: float) -> TokenLogprobs:
    """Returns the log-probabilities of `token` and of the likeliest `ids`, given log(sum(exp(logits)))."""
    return TokenLogprobs(
        float(logits[token]) - log_total, tuple((each, float(logits[each]) - log_total) for each in ids)
    )
