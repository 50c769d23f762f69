"""The steps as modules without state, to be compiled: rows in, one small tensor of results out.

A row is one int32 vector. Graphs have no host reads, random numbers, data-dependent shapes or 64-bit arithmetic
(tests/runners/graph_check.py). Greedy rows are decided in the graph; the host draws the others from logits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tandem.runners.protocol import TAIL, ProposeRow, RowFailed, VerifyRow
from tandem.runners.torch.slot_model import TorchModel
from tandem.speculation.types import Verdict

Buffers = Sequence[Tensor]


class ModelStep(nn.Module):
    def __init__(self, model: TorchModel) -> None:
        super().__init__()
        self.module, self._model = model.module, model


class PrefillModule(ModelStep):
    """Writes the cache. rows [n, 2 + chunk], int32: slot, first position, tokens. Returns [n]: the next position."""

    def forward(self, buffers: Buffers, rows: Tensor) -> Tensor:
        slots, starts, tokens = rows[:, 0], rows[:, 1], rows[:, 2:]
        self._model.traced(buffers, slots, tokens, starts, head=False)
        return starts + tokens.shape[1]


class VerifyModule(ModelStep):
    """Verifies greedy drafts by agreement.

    rows [n, 3 + width], int32: slot, position, draft count, last committed token, draft (padded). Returns logits [n,
    width, vocabulary] and int32 [n, width + 2]: the target's tokens, accepted count, whether logits are finite.
    """

    def forward(self, buffers: Buffers, rows: Tensor) -> tuple[Tensor, Tensor]:
        tokens = rows[:, 3:]
        logits = self._model.traced(buffers, rows[:, 0], tokens, rows[:, 1])
        return logits, torch.cat(verify_greedy(logits, tokens[:, 1:], rows[:, 2], self._model.columns), dim=1)


class ProposeModule(ModelStep):
    """Drafts k tokens greedily: [n, k]. rows [n, 3 + TAIL], int32: slot, position, tail length, tail (padded)."""

    def __init__(self, model: TorchModel, k: int) -> None:
        super().__init__(model)
        self.k = k

    def forward(self, buffers: Buffers, rows: Tensor) -> Tensor:
        slots, last, count, tail = rows[:, 0], rows[:, 1], rows[:, 2], rows[:, 3:]
        hidden = self._hidden(buffers, slots, tail, last + 1 - count)
        at = (count - 1)[:, None, None].expand(-1, 1, hidden.shape[2])
        drafts = [self._chosen(hidden.gather(1, at)[:, 0])]
        for i in range(1, self.k):
            drafts.append(self._chosen(self._hidden(buffers, slots, drafts[-1][:, None], last + i)[:, 0]))
        return torch.stack(drafts, dim=1)

    def _hidden(self, buffers: Buffers, slots: Tensor, tokens: Tensor, starts: Tensor) -> Tensor:
        return self._model.traced(buffers, slots, tokens, starts, head=False)

    def _chosen(self, hidden: Tensor) -> Tensor:
        # the next draft token, int32 [n]; scaled or capped logits would have the same argmax
        return self._model.tokens_of(likeliest(self.module.get_output_embeddings()(hidden)))


class LogitsModule(ModelStep):
    """A draft's logits [n, head] after each row. rows [n, 3 + width], int32: slot, position, count, tokens."""

    def forward(self, buffers: Buffers, rows: Tensor) -> Tensor:
        hidden = self._model.traced(buffers, rows[:, 0], rows[:, 3:], rows[:, 1], head=False)
        at = (rows[:, 2] - 1)[:, None, None].expand(-1, 1, hidden.shape[2])
        logits: Tensor = self.module.get_output_embeddings()(hidden.gather(1, at)[:, 0])
        return logits


class FusedModule(nn.Module):
    """A greedy round: k draft steps, verification, acceptance, and the rows of the next round.

    rows [n, 4 + TAIL], int32: slot, position, tail length, draft tokens (at most k), tail (padded). Returns logits [n,
    width, vocabulary], the next rows, and for one copy to the host [n, k + width + 2 + 4 + TAIL]: drafts, the results
    of VerifyModule, next rows. `width` is VerifyModule's, so bits agree. Rows of the slot `spare` are padding.
    """

    def __init__(self, target: TorchModel, draft: TorchModel, k: int, width: int) -> None:
        super().__init__()
        self._spare, self._order = target.spare, target.columns
        self.verify, self.propose = VerifyModule(target), ProposeModule(draft, k)
        self._width, self._known = width, target.vocab_size

    def forward(self, target: Buffers, draft: Buffers, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        slots, last, behind, wanted, tail = rows[:, 0], rows[:, 1], rows[:, 2], rows[:, 3], rows[:, 4:]
        drafts = self.propose(draft, torch.cat((rows[:, :3], tail), dim=1))
        token = tail.gather(1, (behind - 1)[:, None])
        fed = torch.where(drafts < self._known, drafts, 0)
        counts = torch.minimum(wanted, leading(drafts < self._known, self._order))
        padding = fed[:, -1:].expand(-1, self._width - 1 - self.propose.k)
        packed = torch.cat((slots[:, None], last[:, None], counts[:, None], token, fed, padding), dim=1)
        logits, results = self.verify(target, packed)
        after = torch.where(slots[:, None] == self._spare, rows, self._next(slots, last, wanted, token, results))
        return logits, after, torch.cat((drafts, results, after), dim=1)

    def _next(self, slots: Tensor, last: Tensor, wanted: Tensor, token: Tensor, results: Tensor) -> Tensor:
        # tails are two tokens: the cache lacks a fully accepted draft's last token
        accepted = results[:, self._width]
        committed = torch.cat((token, results[:, : self._width]), dim=1)
        tail = committed.gather(1, accepted[:, None] + self._order[:2][None])
        two = torch.full_like(slots, 2)
        head = torch.stack((slots, last + accepted + 1, two, wanted), dim=1)
        return torch.cat((head, tail, tail[:, 1:].expand(-1, TAIL - 2)), dim=1)


def verify_greedy(logits: Tensor, drafts: Tensor, counts: Tensor, order: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`agree` (tandem/speculation/rules.py) at temperature 0, for a batch.

    logits [n, width, vocabulary]; drafts [n, width - 1], counts[r] of them in use; order: 0, 1, ..., width or more.
    Returns int32 tokens [n, width], accepted counts [n, 1], whether logits up to there are finite [n, 1].
    """
    best = likeliest(logits)
    finite = logits.gather(-1, best[..., None])[..., 0].isfinite()
    accepted = torch.minimum(leading(drafts == best[:, :-1], order), counts)
    sound = leading(finite, order) > accepted
    return best, accepted[:, None], sound[:, None].to(torch.int32)


def likeliest(logits: Tensor) -> Tensor:
    return logits.argmax(-1).to(torch.int32)


def leading(flags: Tensor, order: Tensor) -> Tensor:
    """Counts true flags [n, m] before the first false: [n]. (cumprod does not lower to StableHLO.)"""
    count = flags.shape[1]
    if not count:
        return order.new_zeros(len(flags))
    return torch.where(flags, count, order[:count][None]).amin(dim=1)


def verdict_of(values: list[int], width: int) -> Verdict | RowFailed:
    """Unpacks `verify_greedy`: `width` tokens, the accepted count, and whether logits are finite."""
    accepted, sound = values[width], values[width + 1]
    if not sound:
        return RowFailed("target logits: no finite largest logit")
    return Verdict(tuple(values[: accepted + 1]), accepted)


def padded(tokens: Sequence[int], width: int) -> list[int]:
    """Pads with the last token up to `width`."""
    return [*tokens, *[tokens[-1]] * (width - len(tokens))]


def verify_row(row: VerifyRow, width: int) -> list[int]:
    return [row.slot, row.position, len(row.draft), *padded((row.last_token, *row.draft), width)]


def propose_row(row: ProposeRow) -> list[int]:
    return [row.slot, row.position, len(row.tail), *padded(row.tail, TAIL)]


def fused_row(row: ProposeRow) -> list[int]:
    return [row.slot, row.position, len(row.tail), row.k, *padded(row.tail, TAIL)]
