"""Steps of a draft that samples, for platforms where only graphs may run.

Under agreement the draft uses the target's noise, made on the host and passed as an argument. Drafts need not be exact:
float32 and a nucleus of at most CANDIDATES tokens suffice. Under rejection the verifier needs exact distributions, so
the host draws each token from LogitsModule's row.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from tandem.runners.protocol import ProposeRow
from tandem.runners.torch.graph_modules import Buffers, ProposeModule, likeliest
from tandem.runners.torch.model import TorchModel
from tandem.speculation.draws import gumbel, words
from tandem.speculation.types import SamplingParams

CANDIDATES = 64  # most likely tokens, to which top-k, top-p and min-p are applied
WARPING = 5  # columns of a row's warping: temperature, top-k, top-p, min-p, whether no token is cut off
EVERY = 2.0**30  # a top-k that keeps all tokens


class LogitsModule(nn.Module):
    """A draft's logits [n, head] after each row. rows [n, 3 + width], int32: slot, position, count, tokens."""

    def __init__(self, model: TorchModel, length: int) -> None:
        super().__init__()
        self.module, self._model, self._length = model.module, model, length

    def forward(self, buffers: Buffers, rows: Tensor) -> Tensor:
        hidden = self._model.traced(buffers, rows[:, 0], rows[:, 3:], rows[:, 1], self._length, head=False)
        at = (rows[:, 2] - 1)[:, None, None].expand(-1, 1, hidden.shape[2])
        logits: Tensor = self.module.get_output_embeddings()(hidden.gather(1, at)[:, 0])
        return logits


class SampledProposeModule(ProposeModule):
    """Drafts k tokens: [n, k]. noise [n, k, head] and warping [n, WARPING], float32; ProposeModule's rows."""

    def forward(self, buffers: Buffers, noise: Tensor, warping: Tensor, rows: Tensor) -> Tensor:  # type: ignore[override]
        self._noise, self._warping = noise, warping
        return super().forward(buffers, rows)

    def _chosen(self, hidden: Tensor, i: int) -> Tensor:
        logits = self.module.get_output_embeddings()(hidden)
        return self._model.tokens_of(drawn(logits, self._noise[:, i], self._warping, self._model.columns))


def drawn(logits: Tensor, noise: Tensor, warping: Tensor, order: Tensor) -> Tensor:
    """Gumbel-max draws, int32 [n], like `draws.draw`. logits, noise [n, head], warping [n, WARPING], float32."""
    temperature, top_k, top_p, min_p, whole = (warping[:, i : i + 1] for i in range(WARPING))
    scores = logits.float() / temperature
    best, ids = scores.topk(min(CANDIDATES, scores.shape[1]), dim=-1)
    shares = torch.softmax(scores, dim=-1).gather(1, ids)
    among = order[: best.shape[1]].float()[None] < top_k
    kept = torch.where(among, shares, 0.0)
    total = torch.where(top_k < EVERY, kept.sum(dim=1, keepdim=True), 1.0)
    before = kept.cumsum(dim=1) - kept
    among = among & (before < top_p * total) & (shares >= min_p * shares[:, :1])
    floor = torch.where(among, best, best[:, :1]).amin(dim=1, keepdim=True)
    return likeliest(torch.where((scores >= floor) | (whole > 0), scores + noise, -1e30))


def warping_of(params: SamplingParams) -> list[float]:
    """WARPING numbers. A greedy row has temperature 1 and noise 0."""
    if params.greedy:
        return [1.0, EVERY, 1.0, 0.0, 1.0]
    whole = params.top_k == 0 and params.top_p == 1 and params.min_p == 0
    return [params.temperature, params.top_k or EVERY, params.top_p, params.min_p, float(whole)]


def noise_of(
    rows: Sequence[ProposeRow], batch: int, k: int, vocab_size: int, only: NDArray[np.integer] | None
) -> NDArray[np.float32]:
    """The target's noise for each row's next k positions, float32 [batch, k, head]; 0 for greedy and padding rows."""
    noise = np.zeros((batch, k, vocab_size if only is None else len(only)), dtype=np.float32)
    for r, row in enumerate(rows):
        if not row.request.sampling.greedy:
            for i in range(min(k, row.k)):
                raw = words(row.request.sampling.seed, row.position + 1 + i, vocab_size)
                noise[r, i] = gumbel(raw if only is None else raw[only])
    return noise
