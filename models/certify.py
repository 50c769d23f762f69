"""Same row, same bits: checked on this device, with these weights and threads, before a server says it is ready.

Tandem's promise is that a token's logits are bit-identical whether it was decoded alone or verified in a window, in any
row, beside any neighbours, and after its prefix was rebuilt by prefill. Kernels choose their order of summation by
shape, not by data, so a shape that gives the same bits on one sequence for every column, row and 30 layers of sums
gives them on all. Where some shape differs (cuBLAS, float16), only one remains in use: the widest window at the full
batch; and the result says whether even that one agrees with prefill.
"""

from __future__ import annotations

import torch
from torch import Tensor

from models.runner import Limits, StepShapes
from models.torch_model import TorchModel


def certify(model: TorchModel, limits: Limits, widths: tuple[int, ...], batches: tuple[int, ...]) -> StepShapes:
    """Runs one sequence through every shape. Returns all shapes where they agree, else the one all must use."""
    probe = _Probe(model, limits, widths[-1])
    reference = probe.stepwise(widths[-1], batches[-1])
    agreeing = [(width, batch) for batch in batches for width in widths if probe.agrees(reference, width, batch)]
    rebuilt = torch.equal(probe.after_prefill(widths[-1], batches[-1]), reference[-1])
    if rebuilt and len(agreeing) == len(widths) * len(batches):
        return StepShapes(widths, batches, bit_exact=True)
    only = (widths[-1], batches[-1])
    return StepShapes((only[0],), (only[1],), bit_exact=rebuilt and only in agreeing)


class _Probe:
    """A fixed pseudo-random sequence fed in different shapes."""

    def __init__(self, model: TorchModel, limits: Limits, widest: int) -> None:
        self.model, self.limits = model, limits
        self.count = min(widest + 1, limits.max_length // 2)
        self.start = min(limits.chunk, limits.max_length - self.count)
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(0, model.vocab_size, (self.start + self.count,), generator=generator)
        self.noise = torch.randint(0, model.vocab_size, (self.start,), generator=generator)
        for slot in range(limits.slots):
            self._prefill(slot, self.start)

    def stepwise(self, width: int, batch: int) -> Tensor:
        """Logits [count, vocabulary] of plain decoding at one shape: each token in turn in column 0, of row 0."""
        return torch.stack([self._window(i, 1, width, batch)[0, 0] for i in range(self.count)])

    def agrees(self, reference: Tensor, width: int, batch: int) -> bool:
        """Whether a window over the tokens gives the reference's bits in every column of every row."""
        used = min(width, self.count)
        logits = self._window(0, used, width, batch)
        return all(torch.equal(row[:used], reference[:used]) for row in logits)

    def after_prefill(self, width: int, batch: int) -> Tensor:
        """Logits of the last token when everything before it came through prefill."""
        for slot in range(self.limits.slots):
            self._prefill(slot, self.start + self.count - 1)
        return self._window(self.count - 1, 1, width, batch)[0, 0]

    def _window(self, offset: int, used: int, width: int, batch: int) -> Tensor:
        """Feeds tokens[offset : offset + used] padded to `width` in `batch` rows, last slot first."""
        window = self.tokens[self.start + offset :][:used]
        padded = torch.cat([window, self.noise.repeat(width)[: width - used]])
        rows = padded.repeat(batch, 1).to(self.model.device)
        slots = list(range(self.limits.slots))[::-1][:batch]
        starts = self.model.tensor([self.start + offset] * batch)
        return self.model.forward(slots, rows, starts)

    def _prefill(self, slot: int, count: int) -> None:
        chunk = self.limits.chunk
        for start in range(0, count, chunk):
            part = self.tokens[start : min(start + chunk, count)]
            padded = torch.cat([part, self.noise.repeat(chunk)[: chunk - len(part)]])
            self.model.forward([slot], padded[None].to(self.model.device), self.model.tensor([start]), head=False)
