"""An EAGLE-3 head's steps as graphs, next to a target with graphs (tandem/runners/torch/graph_modules.py).

`buffers`: the head's keys and values, the only ones written; the target's features [1, slots * length, 3 * target
hidden]; the embedding [vocabulary, hidden].
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tandem.runners.eagle.hidden_states import TargetFeatures
from tandem.runners.eagle.module import EagleHead
from tandem.runners.protocol import TAIL, ProposeRow, RunnerIdentity, StepShapes
from tandem.runners.startup import Startup
from tandem.runners.torch.graph_model import DraftGraphs
from tandem.runners.torch.graph_modules import Buffers, likeliest, propose_row
from tandem.runners.torch.graph_runner import GraphRunner
from tandem.runners.torch.kernels import attention_rows, slot_attention
from tandem.runners.torch.platforms import Platform
from tandem.runners.torch.slot_cache import GatheredSlots, SlotCache
from tandem.runners.torch.slot_model import to_host
from tandem.runners.torch.torch_runner import tail_buckets


class HeadStep(nn.Module):
    """Shared parts of the steps. columns: 0, 1, ... int32, as many as positions of a slot; `known`: in the features."""

    _columns: Tensor
    _ids: Tensor
    _shown: Tensor
    _hidden: Tensor

    def __init__(self, head: EagleHead, columns: Tensor, known: int) -> None:
        super().__init__()
        self.head, self._known = head, known
        self._groups = head.config.num_attention_heads // head.config.num_key_value_heads
        dtype = head.fc.weight.dtype
        mask = torch.tensor([0.0, torch.finfo(dtype).min], dtype=dtype, device=columns.device)
        # As buffers: freezing loses a constant that a graph names in several places.
        self.register_buffer("_columns", columns, persistent=False)
        self.register_buffer("_ids", head.token_ids.to(torch.int32), persistent=False)
        self.register_buffer("_shown", mask[0].clone(), persistent=False)
        self.register_buffer("_hidden", mask[1].clone(), persistent=False)

    def positions(self, starts: Tensor, width: int) -> Tensor:
        """Positions [n, width] from starts [n] on."""
        return starts[:, None] + self._columns[:width][None]

    def fused(self, features: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
        """Fused features [n, width, hidden] of the tokens before positions [n, width]; zeros if none or not finite."""
        before = (positions - 1).clamp(min=0)
        at = (slots[:, None] * self._known + before).reshape(-1)
        found = features[0].index_select(0, at).view(*positions.shape, -1)
        known = found.isfinite() & (positions > 0)[..., None]
        return self.head.fuse(torch.where(known, found, 0))

    def keys(
        self, buffers: Buffers, slots: Tensor, tokens: Tensor, hidden: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Writes keys and values of tokens [n, width]; returns residual, queries, and the slots' keys and values."""
        embeds = nn.functional.embedding(tokens, buffers[3]).to(hidden.dtype)
        residual, q, k, v = self.head.project(embeds, hidden, (positions - 1).clamp(min=0))
        cache = GatheredSlots(buffers, slots, positions, len(self._columns))
        return residual, q, *cache.update(k, v, 0)

    def next(self, buffers: Buffers, slots: Tensor, tokens: Tensor, hidden: Tensor, starts: Tensor) -> Tensor:
        """Feeds a token per row with hidden [n, 1, hidden]; returns its state [n, 1, hidden]."""
        positions = starts[:, None]
        residual, q, keys, values = self.keys(buffers, slots, tokens[:, None], hidden, positions)
        return self._finished(residual, q, keys, values, starts)

    def after_tail(self, buffers: Buffers, rows: Tensor) -> Tensor:
        """Feeds the tails of rows [n, 3 + TAIL] with features; returns the last states [n, 1, hidden]."""
        slots, last, count, tail = rows[:, 0], rows[:, 1], rows[:, 2], rows[:, 3:]
        positions = self.positions(last + 1 - count, tail.shape[1])
        inputs = self.fused(buffers[2], slots, positions)
        residual, q, keys, values = self.keys(buffers, slots, tail, inputs, positions)
        at = (count - 1)[:, None, None]
        residual = residual.gather(1, at.expand(-1, 1, residual.shape[2]))
        q = q.gather(2, at[..., None].expand(-1, q.shape[1], 1, q.shape[3]))
        return self._finished(residual, q, keys, values, last)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [n, columns] of states [n, 1, hidden]."""
        return self.head.logits(hidden[:, 0])

    def _finished(self, residual: Tensor, q: Tensor, keys: Tensor, values: Tensor, at: Tensor) -> Tensor:
        attended, _ = slot_attention(self.head, q, keys, values, self._mask(at), scaling=None)
        return self.head.finish(residual, attended.transpose(1, 2))

    def _mask(self, at: Tensor) -> Tensor:
        # the first token has no feature before it, so no other token sees it
        columns, own = self._columns[None], at[:, None]
        seen = (columns <= own) & ((columns > 0) | (own == 0))
        mask = torch.where(seen, self._shown, self._hidden)[:, None, None]
        return mask.expand(-1, 1, attention_rows(1, self._groups), -1)


class HeadPrefill(HeadStep):
    """Writes the cache. rows [n, 2 + chunk], int32: slot, first position, tokens. Returns [n]: the next position."""

    def forward(self, buffers: Buffers, rows: Tensor) -> Tensor:
        slots, starts, tokens = rows[:, 0], rows[:, 1], rows[:, 2:]
        positions = self.positions(starts, tokens.shape[1])
        self.keys(buffers, slots, tokens, self.fused(buffers[2], slots, positions), positions)
        return starts + tokens.shape[1]


class HeadPropose(HeadStep):
    """Drafts k tokens greedily: int32 [n, k]. rows [n, 3 + TAIL] as ProposeModule's."""

    def __init__(self, head: EagleHead, columns: Tensor, known: int, k: int) -> None:
        super().__init__(head, columns, known)
        self.k = k

    def forward(self, buffers: Buffers, rows: Tensor) -> Tensor:
        slots, last = rows[:, 0], rows[:, 1]
        hidden = self.after_tail(buffers, rows)
        drafts = [self._chosen(hidden)]
        for i in range(1, self.k):
            hidden = self.next(buffers, slots, drafts[-1], hidden, last + i)
            drafts.append(self._chosen(hidden))
        return torch.stack(drafts, dim=1)

    def _chosen(self, hidden: Tensor) -> Tensor:
        return self._ids.index_select(0, likeliest(self.logits(hidden)))


class HeadFirst(HeadStep):
    """First step of a draft drawn on the host: logits [n, columns] and states [n, hidden] for `HeadNext`."""

    def forward(self, buffers: Buffers, rows: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.after_tail(buffers, rows)
        return self.logits(hidden), hidden[:, 0]


class HeadNext(HeadStep):
    """A further step, like HeadFirst. states [n, hidden]; rows [n, 4], int32: slot, position, 1, token."""

    def forward(self, buffers: Buffers, states: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.next(buffers, rows[:, 0], rows[:, 3], states[:, None], rows[:, 1])
        return self.logits(hidden), hidden[:, 0]


class HeadGraphs(DraftGraphs):
    """Graphs for the buckets of `target`, by its compiler. `slots`: the head's keys and values."""

    prefix = "head-"

    def __init__(
        self,
        head: EagleHead,
        features: TargetFeatures,
        embedding: Tensor,
        slots: SlotCache,
        identity: RunnerIdentity,
        platform: Platform,
        target: GraphRunner,
    ) -> None:
        self.platform, self.device, self.spare = platform, platform.device, slots.spare
        self.buckets = target.buckets
        self._head, self._name, self._graphs = head, identity.model_name, {}
        self._compiler = target.compiler()
        self._buffers = [*slots.buffers, features.values.flatten(0, 1)[None], embedding]
        columns = torch.arange(slots.length, dtype=torch.int32, device=platform.device)
        self._shape = head, columns, features.values.shape[1]

    @property
    def shapes(self) -> StepShapes:
        return StepShapes(tail_buckets(), self.buckets.batches, False, chunks=self.buckets.chunks)

    def compile(self, startup: Startup) -> str:
        """Compiles every graph and seals the compiler; returns the compiler's line."""
        compiler, shape, chunk = self._compiler, self._shape, self.buckets.chunks[0]
        with startup.stage("compiling"):
            self._make(compiler, "prefill", HeadPrefill(*shape), 1, chunk, 2 + chunk)
            for batch in self.buckets.batches:
                for k in self.buckets.drafts:
                    self._make(compiler, "propose", HeadPropose(*shape, k), batch, k, 3 + TAIL)
                if self.platform.only_graphs and self.buckets.drafts:
                    self._make(compiler, "first", HeadFirst(*shape), batch, TAIL, 3 + TAIL)
                    states = self._head.fc.weight.new_zeros(batch, self._head.config.hidden_size)
                    self._make(compiler, "next", HeadNext(*shape), batch, 1, 4, (states,))
            compiler.seal()
        startup.note(f"graphs of {self._name}: {compiler.line()}")
        return compiler.line()

    def warm_up(self, startup: Startup) -> None:
        self.compile(startup)
        with startup.stage("warming"):
            for batch in self.buckets.batches if self.buckets.drafts else ():
                to_host(self.proposed(self.idle_rows([], batch, 3 + TAIL), self.buckets.drafts[-1]))

    def logits(self, rows: Sequence[ProposeRow], drafts: Sequence[Sequence[int]]) -> Tensor:
        """Like DraftGraphs.logits; the head's states stay on the device."""
        batch = self.buckets.batch(len(rows))
        if not drafts[0]:
            packed = self.tensor(self.idle_rows([propose_row(row) for row in rows], batch, 3 + TAIL))
            logits, self._states = self._graph("first", batch, TAIL)(self._buffers, packed)
        else:
            fed = [[r.slot, r.position + len(d), 1, d[-1]] for r, d in zip(rows, drafts, strict=True)]
            packed = self.tensor(self.idle_rows(fed, batch, 4))
            logits, self._states = self._graph("next", batch, 1)(self._buffers, self._states, packed)
        host: Tensor = logits.cpu()
        return host[: len(rows)]
