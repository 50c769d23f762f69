"""Runs an EAGLE-3 head as a draft, with features from its target's steps, or from inboxes if the target is remote."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tandem.runners.capabilities import UNABLE, Capabilities, Trait
from tandem.runners.eagle.head_graphs import HeadGraphs
from tandem.runners.eagle.hidden_states import TargetFeatures, tensor_of
from tandem.runners.eagle.load_head import RemoteHead
from tandem.runners.eagle.module import EagleHead, head_module, llama_config
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
from tandem.runners.torch.graph_modules import padded
from tandem.runners.torch.graph_runner import GraphRunner
from tandem.runners.torch.platforms import Platform
from tandem.runners.torch.slot_cache import SlotCache
from tandem.runners.torch.torch_runner import draft_rows
from tandem.speculation.features import FeatureInbox
from tandem.speculation.types import Request, Verdict


class EagleRunner:
    """Implements Runner for a head, in the target's slot numbers.

    Keys of drafted tokens come from the head's own states until the engine feeds committed tokens again
    (`Capabilities.reprocess_accepted`). `away`: a remote target's; own states replace missing features. `beside`: the
    target whose graphs write the features; the head then has graphs too.
    """

    def __init__(
        self,
        head: EagleHead,
        features: TargetFeatures,
        embedding: Tensor,
        limits: Limits,
        identity: RunnerIdentity,
        platform: Platform,
        away: RemoteHead | None = None,
        beside: GraphRunner | None = None,
    ) -> None:
        self.head, self.features, self.embedding = head, features, embedding
        self.limits, self.identity, self.platform = limits, identity, platform
        self._ids = head.token_ids.cpu()
        widest = max(TAIL, limits.chunk) + limits.max_draft + 1
        config: Any = llama_config(head.config)
        weight = head.fc.weight
        self.slots = SlotCache(config, limits.slots, limits.max_length, widest, weight.dtype, platform)
        self._reads = away.reads(self.follow) if away else UNABLE
        self._own = weight.new_zeros(limits.slots, away.length, head.config.hidden_size) if away else None
        self._inboxes: dict[int, FeatureInbox] = {}
        self._firsts = torch.zeros(limits.slots, dtype=torch.int64, device=weight.device)
        self._ends = torch.zeros_like(self._firsts)
        self.shapes = StepShapes(
            tuple(range(1, TAIL + 1)),
            tuple(range(1, limits.slots + 1)),
            False,
            chunks=tuple(range(1, limits.chunk + 1)),
            ragged=True,
        )
        self.graphs: HeadGraphs | None = None
        if beside:
            self.graphs = HeadGraphs(head, features, embedding, self.slots, identity, platform, beside)
            self.shapes = self.graphs.shapes

    @classmethod
    def elsewhere(cls, folder: Path, made: RemoteHead, dtype: torch.dtype, platform: Platform) -> EagleRunner:
        head = head_module(folder, made.head).to(device=platform.device, dtype=dtype)
        embedding = tensor_of(made.embedding).to(head.fc.weight)
        features = TargetFeatures(head.fc.weight.new_zeros(made.features_shape), embedding)
        return cls(head, features, embedding, made.limits, made.identity, platform, made)

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            frozenset({Trait.HEAD, Trait.WHOLE_SLOTS}), features_in=self._reads, reprocess_accepted=True
        )

    def follow(self, slot: int, inbox: FeatureInbox) -> None:
        self._inboxes[slot] = inbox

    def warm_up(self, startup: Startup | None = None) -> None:
        startup = startup or Startup()
        if self.graphs:
            return self.graphs.warm_up(startup)
        with startup.stage("warming"):
            self.propose([ProposeRow(0, 1, (0, 0), 2, Request())])

    def prefill(self, rows: Sequence[PrefillRow]) -> list[RowFailed | None]:
        """Feeds one row at a time. Next to the target, features of earlier tokens must exist."""
        return self.graphs.prefill(rows) if self.graphs else self._prefill(rows)

    @torch.inference_mode()
    def _prefill(self, rows: Sequence[PrefillRow]) -> list[RowFailed | None]:
        self._take([row.slot for row in rows])
        for row in rows:
            positions = self._positions([row.start], len(row.tokens))
            self._keys([row.slot], self._tensor([row.tokens]), self._fused([row.slot], positions), positions)
        return [None] * len(rows)

    def verify(self, rows: Sequence[VerifyRow]) -> list[Verdict | RowFailed]:
        raise NotImplementedError("an EAGLE head drafts and verifies nothing")

    def propose(self, rows: Sequence[ProposeRow]) -> list[Proposal | RowFailed]:
        if self.graphs and self.graphs.drafts(rows):
            return self.graphs.propose(rows, self.limits.vocab_size, self._ids)
        return self._propose(rows)

    @torch.inference_mode()
    def _propose(self, rows: Sequence[ProposeRow]) -> list[Proposal | RowFailed]:
        slots, width = [row.slot for row in rows], max(len(row.tail) for row in rows)
        hidden = self.embedding

        def logits(drafts: Sequence[Sequence[int]]) -> Tensor:
            nonlocal hidden
            if drafts[0]:
                tokens = self._tensor([[draft[-1]] for draft in drafts])
                positions = self._positions([row.position + len(drafts[0]) for row in rows], 1)
                hidden = self._step(slots, tokens, hidden, positions, self._tensor([0] * len(rows)))
            else:
                self._take(slots)
                positions = self._positions([row.position + 1 - len(row.tail) for row in rows], width)
                tails = self._tensor([padded(row.tail, width) for row in rows])
                last = self._tensor([len(row.tail) - 1 for row in rows])
                hidden = self._step(slots, tails, self._fused(slots, positions), positions, last)
            return self.head.logits(hidden[:, 0])

        return draft_rows(rows, logits, self.limits.vocab_size, self._ids)

    def fused_with(self, draft: Runner) -> FusedStep | None:
        return None

    def _step(self, slots: list[int], tokens: Tensor, hidden: Tensor, positions: Tensor, last: Tensor) -> Tensor:
        """Feeds tokens [rows, width] with hidden inputs; returns states [rows, 1, hidden] of columns `last`."""
        residual, q, keys, values = self._keys(slots, tokens, hidden, positions)
        rows = torch.arange(len(slots), device=tokens.device)
        at = positions[rows, last]
        mask = self._mask(slots, at, keys.shape[2], q.dtype)
        attended = nn.functional.scaled_dot_product_attention(
            q[rows, :, last][:, :, None], keys, values, attn_mask=mask, enable_gqa=True
        )
        stepped = self.head.finish(residual[rows, last][:, None], attended)
        if self._own is not None:
            self._own[self._tensor(slots), at.clamp(max=self._own.shape[1] - 1)] = stepped[:, 0]
        return stepped

    def _keys(
        self, slots: list[int], tokens: Tensor, hidden: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Writes keys and values; returns the tokens' residual and queries, and whole slots' keys and values."""
        embeds = self.embedding[tokens].to(hidden.dtype)
        residual, q, k, v = self.head.project(embeds, hidden, (positions - 1).clamp(min=0))
        self.slots.plan(slots, positions, int(positions.max()) + 1)
        keys, values = self.slots.layers[0].update(k, v)
        return residual, q, keys, values

    def _take(self, slots: Sequence[int]) -> None:
        for slot in slots:
            if inbox := self._inboxes.get(slot):
                values = self.features.values
                for start, came in inbox.take():
                    found = torch.tensor(came[: max(0, values.shape[1] - start)]).to(values)
                    values[slot, start : start + len(found)] = found
                self._firsts[slot], self._ends[slot] = inbox.seen

    def _mask(self, slots: list[int], at: Tensor, length: int, dtype: torch.dtype) -> Tensor:
        # [rows, 1, 1, length]; no later token sees tokens up to the first feature's position
        columns = torch.arange(length, device=at.device)[None]
        firsts = self._firsts[self._tensor(slots)][:, None]
        seen = (columns <= at[:, None]) & ((columns > firsts) | (columns == at[:, None]))
        hidden = torch.finfo(dtype).min
        return torch.where(seen, 0.0, hidden).to(dtype)[:, None, None]

    def _fused(self, slots: list[int], positions: Tensor) -> Tensor:
        """Fused features [rows, width, hidden] of the tokens before positions [rows, width], or the head's states."""
        which = self._tensor(slots)
        fused = self.head.fuse(self.features.at(which, positions - 1).to(self.head.fc.weight.dtype))
        if self._own is None:
            return fused
        come = (positions - 1 >= self._firsts[which][:, None]) & (positions - 1 < self._ends[which][:, None])
        come |= positions == 0  # no feature is before the first token, and no state
        own = self._own[which[:, None], (positions - 1).clamp(0, self._own.shape[1] - 1)]
        return torch.where(come[..., None], fused, own)

    def _positions(self, starts: Sequence[int], width: int) -> Tensor:
        return self._tensor(starts)[:, None] + torch.arange(width, device=self.platform.device)[None]

    def _tensor(self, values: Any) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.platform.device)
