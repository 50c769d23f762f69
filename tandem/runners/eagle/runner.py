"""Runs an EAGLE-3 head as a draft next to its target: it reads the target's features on the same device thread."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tandem.runners.eagle.features import TargetFeatures
from tandem.runners.eagle.module import EagleHead, llama_config
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
)
from tandem.runners.startup import Startup
from tandem.runners.torch.platforms import Platform
from tandem.runners.torch.runner import DraftedToken, draft_each, proposal_of
from tandem.runners.torch.slot_cache import SlotCache
from tandem.speculation.types import SamplingParams, Verdict


class EagleRunner:
    """Implements Runner for a head. Its slots are the target's: row and feature are found by slot and position.

    The keys of tokens that the head drafted itself come from its own hidden states. `identity.refeeds` makes the engine
    feed such tokens again once they are committed, and then they get the target's features.
    """

    def __init__(
        self,
        head: EagleHead,
        features: TargetFeatures,
        embedding: Tensor,
        limits: Limits,
        identity: RunnerIdentity,
        platform: Platform,
    ) -> None:
        self.head, self.features, self.embedding = head, features, embedding
        self.limits, self.identity, self.platform = limits, identity, platform
        self.token_ids, self.vocab_size = head.token_ids, limits.vocab_size
        widest = max(TAIL, limits.chunk) + limits.max_draft + 1
        config: Any = llama_config(head.config)
        self.slots = SlotCache(config, limits.slots, limits.max_length, widest, head.fc.weight.dtype, platform)
        self.shapes = StepShapes(
            tuple(range(1, TAIL + 1)),
            tuple(range(1, limits.slots + 1)),
            False,
            chunks=tuple(range(1, limits.chunk + 1)),
            ragged=True,
        )

    def warm_up(self, startup: Startup | None = None) -> None:
        with (startup or Startup()).stage("warming"):
            self.propose([ProposeRow(0, 1, (0, 0), 2, SamplingParams())])

    @torch.inference_mode()
    def prefill(self, rows: Sequence[PrefillRow]) -> list[RowFailed | None]:
        """Like Runner.prefill, one row at a time. The target's features of the tokens before each must be there."""
        for row in rows:
            positions = self._positions([row.start], len(row.tokens))
            self._keys([row.slot], self._tensor([row.tokens]), self._fused([row.slot], positions), positions)
        return [None] * len(rows)

    def verify(self, rows: Sequence[VerifyRow]) -> list[Verdict | RowFailed]:
        raise NotImplementedError("an EAGLE head drafts and verifies nothing")

    @torch.inference_mode()
    def propose(self, rows: Sequence[ProposeRow]) -> list[Proposal | RowFailed]:
        """Like Runner.propose; all rows take as many steps as the longest, and shorter ones are cut."""
        started, longest = time.perf_counter(), max(row.k for row in rows)
        if not longest:
            return [Proposal(())] * len(rows)
        slots, width = [row.slot for row in rows], max(len(row.tail) for row in rows)
        positions = self._positions([row.position + 1 - len(row.tail) for row in rows], width)
        tails = self._tensor([[*row.tail, *[row.tail[-1]] * (width - len(row.tail))] for row in rows])
        last = self._tensor([len(row.tail) - 1 for row in rows])
        hidden = self._step(slots, tails, self._fused(slots, positions), positions, last)
        drafts: list[list[DraftedToken]] = [[] for _ in rows]
        for i in range(longest):
            if i:
                tokens = self._tensor([[draft[-1].token] for draft in drafts])
                positions = self._positions([row.position + i for row in rows], 1)
                hidden = self._step(slots, tokens, hidden, positions, torch.zeros_like(last))
            logits = self.head.logits(hidden[:, 0])
            for draft, drafted in zip(drafts, draft_each(self, rows, logits, drafts), strict=True):
                draft.append(drafted)
        seconds = time.perf_counter() - started
        return [proposal_of(draft[: row.k], seconds) for draft, row in zip(drafts, rows, strict=True)]

    def fused_with(self, draft: Runner) -> FusedStep | None:
        return None

    def tokens_of(self, columns: Tensor) -> Tensor:
        """Token ids of columns of the logits; same shape."""
        return self.token_ids[columns]

    def widened(self, logits: Tensor) -> Tensor:
        """float32 logits [rows, vocabulary] from logits [rows, draft vocabulary]; -inf for tokens without a column."""
        full = torch.full((*logits.shape[:-1], self.vocab_size), -torch.inf, device=logits.device)
        return full.index_copy_(-1, self.token_ids, logits.float())

    def _step(self, slots: list[int], tokens: Tensor, hidden: Tensor, positions: Tensor, last: Tensor) -> Tensor:
        """Feeds tokens [rows, width] with their hidden inputs; returns the hidden state [rows, 1, hidden] of one each.

        `last` [rows]: the column of that one.
        """
        residual, q, keys, values = self._keys(slots, tokens, hidden, positions)
        rows = torch.arange(len(slots), device=tokens.device)
        at = positions[rows, last]
        mask = self._mask(at, keys.shape[2], q.dtype)
        attended = nn.functional.scaled_dot_product_attention(
            q[rows, :, last][:, :, None], keys, values, attn_mask=mask, enable_gqa=True
        )
        return self.head.finish(residual[rows, last][:, None], attended)

    def _keys(
        self, slots: list[int], tokens: Tensor, hidden: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Writes keys and values; returns residual and queries of the tokens, and keys and values of whole slots."""
        embeds = self.embedding[tokens].to(hidden.dtype)
        residual, q, k, v = self.head.project(embeds, hidden, (positions - 1).clamp(min=0))
        self.slots.plan(slots, positions, int(positions.max()) + 1)
        keys, values = self.slots.layers[0].update(k, v)
        return residual, q, keys, values

    def _mask(self, at: Tensor, length: int, dtype: torch.dtype) -> Tensor:
        """Additive mask [rows, 1, 1, length] of queries at positions `at` [rows].

        The first token has no feature before it, so no other token sees it.
        """
        columns = torch.arange(length, device=at.device)[None]
        seen = (columns <= at[:, None]) & ((columns > 0) | (at[:, None] == 0))
        hidden = torch.finfo(dtype).min
        return torch.where(seen, 0.0, hidden).to(dtype)[:, None, None]

    def _fused(self, slots: list[int], positions: Tensor) -> Tensor:
        """The target's features of the token before each of positions [rows, width], fused: [rows, width, hidden]."""
        found = self.features.at(self._tensor(slots), positions - 1)
        return self.head.fuse(found.to(self.head.fc.weight.dtype))

    def _positions(self, starts: Sequence[int], width: int) -> Tensor:
        return self._tensor(starts)[:, None] + torch.arange(width, device=self.platform.device)[None]

    def _tensor(self, values: Any) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.platform.device)
