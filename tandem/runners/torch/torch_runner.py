"""Implements Runner on a TorchModel, for CPU and CUDA; a step copies token ids or logits to the host once."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from tandem.checkpoints.adapter_files import Adapter
from tandem.runners.batch_invariance import check_batch_invariance
from tandem.runners.capabilities import Capabilities, FeaturesOut, MemoryOnDemand, No, Pages, Trait
from tandem.runners.eagle.hidden_states import TargetFeatures
from tandem.runners.protocol import (
    TAIL,
    FusedStep,
    Limits,
    PrefillRow,
    Proposal,
    ProposeRow,
    RowFailed,
    Runner,
    RunnerIdentity,
    StepShapes,
    VerifyRow,
    draft_next,
    verdict_or_failure,
    verify_row,
)
from tandem.runners.startup import Startup
from tandem.runners.torch.graph_modules import padded, verdict_of, verify_greedy
from tandem.runners.torch.module_pages import TorchPages, page_bytes, page_format
from tandem.runners.torch.slot_model import TorchModel, to_host
from tandem.speculation.types import Request, SparseDistribution, Verdict


class TorchRunner:
    """`verifies`: a target, whose batch invariance is checked. `exact`: use only step shapes with equal bits."""

    def __init__(
        self, model: TorchModel, limits: Limits, identity: RunnerIdentity, verifies: bool = True, exact: bool = True
    ) -> None:
        self.model, self.limits, self.identity, self._verifies = model, limits, identity, verifies
        self._exact = exact
        self.shapes = StepShapes((limits.max_draft + 1,), (limits.slots,), bit_exact=False, chunks=(limits.chunk,))

    def warm_up(self, startup: Startup | None = None) -> None:
        startup = startup or Startup()
        batches, lengths = batch_buckets(self.limits.slots), length_buckets(self.limits)
        widths = width_buckets(self.limits.max_draft)
        chunks = tuple(sorted({max(1, self.limits.chunk * i // 4) for i in (1, 2, 3, 4)}))
        if self._verifies:
            with startup.stage("certifying"):
                shapes = check_batch_invariance(self.model, self.limits, widths, batches, lengths, chunks, self._exact)
            # How many rows an expert gets at a time depends on the company, which no measurement covers whole.
            self.shapes = replace(shapes, bit_exact=shapes.bit_exact and not self.model.experts)
        else:
            self.shapes = StepShapes(tail_buckets(), batches, False, lengths, chunks, lengths)
            with startup.stage("warming"):
                for batch in batches:
                    self.propose([ProposeRow(s, 0, (0,), 2, Request()) for s in range(batch)])
        for slot in range(self.model.spare + 1):
            self.model.slots.give_back(slot)

    @property
    def capabilities(self) -> Capabilities:
        # a draft's step shapes are not checked
        model = self.model
        slots = model.slots
        traits = {
            Trait.SHARED: model.ranks > 1,
            Trait.WHOLE_SLOTS: model.features is not None or not slots.on_demand,
            Trait.INEXACT: not self.shapes.bit_exact,
        }
        form = page_format(slots, model.ranks, self.limits, torch.get_num_threads())
        return Capabilities(
            traits=frozenset(trait for trait, is_one in traits.items() if is_one),
            pages=Pages(page_bytes(slots, model.features), form, self.page_store),
            adapters=self.put_adapter,
            memory_on_demand=MemoryOnDemand(slots.taken(self._widest), self.kv_bytes, self.give_back),
            features_out=self._features_out(),
        )

    def _features_out(self) -> FeaturesOut | No:
        try:
            return FeaturesOut(self.model.layer_count, self.model.hidden_size, self.hand_out)
        except ValueError as error:  # a model of another kind
            return No(str(error).removeprefix("draft: "))

    def page_store(self, pages: int) -> TorchPages:
        return TorchPages(self.model.slots, pages, self.model.features)

    def kv_bytes(self, tokens: int) -> int:
        """Like MemoryOnDemand.kv_bytes, with the last step's padding."""
        return self.model.slots.taken(tokens + self._widest)

    def give_back(self, slot: int, tokens: int = 0) -> None:
        self.model.slots.give_back(slot, tokens + self._widest if tokens else 0)

    @property
    def _widest(self) -> int:
        return self.model.slots.length - self.limits.max_length

    def put_adapter(self, number: int, adapter: Adapter) -> None:
        self.model.adapters.put(number, adapter)

    def prefill(self, rows: Sequence[PrefillRow]) -> list[RowFailed | None]:
        for row in rows:
            tokens = self.model.tensor([padded(row.tokens, self.shapes.chunk(len(row.tokens)))])
            length = self.shapes.prefill_length(row.start + len(row.tokens))
            starts, adapters = self.model.tensor([row.start]), [row.adapter]
            self.model.forward([row.slot], tokens, starts, length, head=False, adapters=adapters)
        return [None] * len(rows)

    def verify(self, rows: Sequence[VerifyRow]) -> list[Verdict | RowFailed]:
        # a failed row's slot is cleared, or its NaNs would reach the next sequence
        verdicts = self._verdicts(rows)
        for row, verdict in zip(rows, verdicts, strict=True):
            if isinstance(verdict, RowFailed):
                self.model.slots.clear(row.slot)
        return verdicts

    def _verdicts(self, rows: Sequence[VerifyRow]) -> list[Verdict | RowFailed]:
        logits = self.verify_logits(rows)
        if all(row.plain for row in rows):
            width, tensor = logits.shape[1], self.model.tensor
            drafts = tensor([padded((row.last_token, *row.draft), width)[1:] for row in rows])
            counts = tensor([len(row.draft) for row in rows])
            found = torch.cat(verify_greedy(logits[: len(rows)], drafts, counts, self.model.columns), dim=1)
            return [verdict_of(values, width) for values in to_host(found)]
        host = logits.cpu().float().numpy()  # in this order: nothing but graphs runs on the device
        return [
            verdict_or_failure(functools.partial(verify_row, row, host[r].__getitem__)) for r, row in enumerate(rows)
        ]

    def verify_logits(self, rows: Sequence[VerifyRow]) -> Tensor:
        """Logits [rows or more, width, vocabulary]; column i predicts the token after draft[:i]."""
        width = self.shapes.width(1 + max(len(row.draft) for row in rows))
        tokens = [padded((row.last_token, *row.draft), width) for row in rows]
        adapters = [row.adapter for row in rows]
        return self._forward([row.slot for row in rows], tokens, [row.position for row in rows], adapters)

    def propose(self, rows: Sequence[ProposeRow]) -> list[Proposal | RowFailed]:
        slots, adapters = [row.slot for row in rows], [row.adapter for row in rows]

        def logits(drafts: Sequence[Sequence[int]]) -> Tensor:
            if drafts[0]:
                last, at = [[d[-1]] for d in drafts], [row.position + len(drafts[0]) for row in rows]
                return self._forward(slots, last, at, adapters)[: len(rows), 0]
            width = self.shapes.width(max(2, *(len(row.tail) for row in rows)))
            starts = [row.position + 1 - len(row.tail) for row in rows]
            first = self._forward(slots, [padded(row.tail, width) for row in rows], starts, adapters)
            columns = self.model.tensor([len(row.tail) - 1 for row in rows])
            return first[torch.arange(len(rows), device=first.device), columns]

        return draft_rows(rows, logits, self.model.vocab_size, self.model.draft_vocab)

    def fused_with(self, draft: Runner) -> FusedStep | None:
        return None

    def hand_out(self, layers: Sequence[int]) -> TargetFeatures:
        return self.model.hand_out(layers)

    def _forward(
        self, slots: list[int], tokens: Sequence[Sequence[int]], starts: list[int], adapters: Sequence[int] = ()
    ) -> Tensor:
        """Logits [batch, width, vocabulary], padded to a batch bucket."""
        missing = self.shapes.batch(len(slots)) - len(slots)
        return self.model.forward(
            slots + [self.model.spare] * missing,
            self.model.tensor([*tokens, *[tokens[0]] * missing]),
            self.model.tensor(starts + [0] * missing),
            self.shapes.length(max(starts) + len(tokens[0])),
            adapters=adapters,
        )


def draft_rows(
    rows: Sequence[ProposeRow], logits: Callable[[Sequence[Sequence[int]]], Tensor], vocab_size: int, ids: Tensor | None
) -> list[Proposal | RowFailed]:
    """Drafts the longest row's number of tokens; others are cut.

    `logits`: [rows, columns] after drafts; `ids`: the columns' tokens (None: all).
    """
    started, longest = time.perf_counter(), max(row.k for row in rows)
    tokens: list[list[int]] = [[] for _ in rows]
    sent: list[list[SparseDistribution]] = [[] for _ in rows]
    greedy = all(row.plain for row in rows)
    for _ in range(longest):
        found = logits(tokens)
        if greedy:
            best = found.argmax(-1)
            best = best if ids is None else ids.to(best.device)[best]
            for own, token in zip(tokens, best.tolist(), strict=True):
                own.append(token)
            continue
        host = _widened(found.float(), vocab_size, ids).cpu().numpy()
        for r, row in enumerate(rows):
            token, distribution = draft_next(row, host[r], tokens[r])
            tokens[r].append(token)
            sent[r] += [] if distribution is None else [distribution]
    seconds = time.perf_counter() - started if longest else 0.0
    return [
        Proposal(tuple(own[: row.k]), seconds, tuple(drawn[: row.k]))
        for row, own, drawn in zip(rows, tokens, sent, strict=True)
    ]


def _widened(logits: Tensor, vocab_size: int, ids: Tensor | None) -> Tensor:
    """Logits [rows, vocabulary] from [rows, columns]; -inf for tokens without a column."""
    if ids is None:
        return logits
    full = torch.full((len(logits), vocab_size), -torch.inf, device=logits.device)
    return full.index_copy_(-1, ids.to(logits.device, torch.int64), logits)


def width_buckets(max_draft: int) -> tuple[int, ...]:
    """Tokens per row: every small width, then powers of two and the widest."""
    widest = max_draft + 1
    if widest <= 8:
        return tuple(range(1, widest + 1))
    return (*(2**i for i in range(widest.bit_length()) if 2**i < widest), widest)


def tail_buckets() -> tuple[int, ...]:
    """Tokens per row of a draft's steps, up to the longest tail."""
    return (1, 2, 4, TAIL)


def batch_buckets(slots: int) -> tuple[int, ...]:
    """Rows per step: 1, 2, 3, 4, 6, 8, 12, 16, ... up to all slots."""
    sizes = sorted({2**i for i in range(20)} | {3 * 2**i for i in range(20)})
    return (*(s for s in sizes if s < slots), slots)


def length_buckets(limits: Limits) -> tuple[int, ...]:
    """Cache positions that attention reads for short sequences; longer ones read all."""
    return tuple(n for n in (128, 256, 512, 1024) if limits.max_draft < limits.chunk <= n < limits.max_length)
