"""Trains an EAGLE-3 head on the target's continuations with the training-time test, for Tandem, vLLM and SGLang.

    python -m tandem_train.heads.train_head --data DIR --output HEAD

An interrupted run, started again with the same arguments, resumes from its last saved step.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tandem.checkpoints.gguf_cache import unpacked
from tandem.checkpoints.head_config import HeadConfig, default_layers
from tandem.checkpoints.locate import find, weights_revision
from tandem.runners.eagle.module import EagleHead, write_head
from tandem_train.shards import TrainingSequence
from tandem_train.train import best_counts, most_frequent, read_data
from tandem_train.train_loop import Resumable, TrainingBatch, make_batch
from tandem_train.training_settings import HeadTrainConfig, run_command, show


def head_states(head: EagleHead, embedding: Tensor, batch: TrainingBatch, steps: int) -> list[Tensor]:
    """The head's hidden states by step, [rows, length - 1, hidden]; step s is valid from column s on."""
    embeds = embedding[batch.tokens[:, 1:]].to(head.fc.weight.dtype)
    count = embeds.shape[1]
    positions = torch.arange(count, device=embeds.device)[None].expand(len(embeds), -1)
    hidden = head.fuse(batch.features[:, :-1].to(head.fc.weight.dtype))
    keys: list[Tensor] = []
    values: list[Tensor] = []
    states: list[Tensor] = []
    for step in range(steps):
        residual, q, k, v = head.project(embeds, hidden, positions)
        groups = q.shape[1] // k.shape[1]
        keys.append(k.repeat_interleave(groups, 1))
        values.append(v.repeat_interleave(groups, 1))
        state = head.finish(residual, _attended(q, keys, values, step))
        states.append(state)
        hidden = torch.roll(state, 1, 1)
    return states


def _attended(q: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], step: int) -> Tensor:
    """Attends to keys of step 0 up to row r - step, and of step i at row r - step + i; [b, heads, rows, d]."""
    scale, rows = 1 / math.sqrt(q.shape[-1]), torch.arange(q.shape[2], device=q.device)
    seen = rows[None, :] <= rows[:, None] - step
    scores = q @ keys[0].transpose(-1, -2) * scale
    scores = scores.masked_fill(~seen, torch.finfo(scores.dtype).min)
    own = [(q * torch.roll(keys[i], step - i, 2)).sum(-1, keepdim=True) * scale for i in range(1, step + 1)]
    weights = torch.softmax(torch.cat([scores, *own], -1), -1)
    out = weights[..., : len(rows)] @ values[0]
    for i in range(1, step + 1):
        out = out + weights[..., len(rows) + i - 1, None] * torch.roll(values[i], step - i, 2)
    return out


def step_losses(
    head: EagleHead, embedding: Tensor, batch: TrainingBatch, steps: int, hard: float = 0.0
) -> list[tuple[Tensor, Tensor]]:
    """Each step's mean cross-entropy, and the answered tokens whose best token the head's best column is.

    hard: weight of the target's best token. A best token that the head lacks is missed, not learnt.
    """
    columns = torch.full((len(head.t2d),), -1, device=batch.ids.device)
    columns[head.token_ids] = torch.arange(len(head.token_ids), device=columns.device)
    wanted = columns[batch.ids]
    weights = torch.where(wanted >= 0, batch.probs, 0)
    weights = (1 - hard) * weights / weights.sum(-1, keepdim=True).clamp(min=1e-9)
    weights[:, 0] += hard
    learnt = wanted[:, 0] >= 0
    of, at = batch.where[:, 0], batch.where[:, 1] - 1  # a row of states has read the token at the column
    losses = []
    for step, state in enumerate(head_states(head, embedding, batch, steps)):
        rows = (at >= step).nonzero()[:, 0]
        logprobs = head.logits(state[of[rows], at[rows]]).float().log_softmax(-1)
        entropy = -(weights[rows] * logprobs.gather(-1, wanted[rows].clamp(min=0))).sum(-1)
        mask = learnt[rows]
        loss = (entropy * mask).sum() / mask.sum().clamp(min=1)
        losses.append((loss, (logprobs.argmax(-1) == wanted[rows, 0]) & mask))
    return losses


class FeatureTarget:
    """The target in transformers, with taps after three layers. `batch`: about a step's tokens. Raises ValueError."""

    def __init__(self, source: dict[str, object], layers: Sequence[int] | None, device: str, batch: int) -> None:
        from transformers import AutoModelForCausalLM

        from tandem.runners.eagle.hidden_states import decoder_layers, tap
        from tandem.runners.load_runner import choose_dtype, transformers_logging
        from tandem.runners.torch.platforms import choose_platform

        transformers_logging()
        self.device = choose_platform(device).name
        module: Any = AutoModelForCausalLM.from_pretrained(**source, dtype=choose_dtype("auto", self.device))
        self._module = module.to(self.device).eval().requires_grad_(False)
        count = len(decoder_layers(module))
        self.layers = tuple(layers or default_layers(count))
        if len(self.layers) != 3 or not all(1 <= layer <= count for layer in self.layers):
            raise ValueError(f"layers: {list(self.layers)} are not three of the target's {count}, counted from 1")
        tap(module, self.layers)
        self._batch = batch

    @torch.inference_mode()
    def features(self, data: Sequence[TrainingSequence]) -> list[Tensor]:
        """Features [tokens, 3 * hidden] of each sequence, on the target's device, in its dtype."""
        from transformers import DynamicCache

        sequences = [np.concatenate((one.prompt, one.answer)) for one in data]
        made: list[Tensor] = [torch.empty(0)] * len(sequences)
        order = sorted(range(len(sequences)), key=lambda i: (len(sequences[i]), i))
        while order:
            longest = len(sequences[order[-1]])
            group = [order.pop() for _ in range(min(len(order), max(1, self._batch // longest)))]
            padded = torch.zeros(len(group), longest, dtype=torch.int64)
            for row, i in enumerate(group):  # padding stands behind, where no token sees it
                padded[row, : len(sequences[i])] = torch.from_numpy(sequences[i].astype(np.int64))
            cache: Any = DynamicCache()
            cache.caught = {}
            self._module.base_model(input_ids=padded.to(self.device), past_key_values=cache)
            caught = torch.cat([cache.caught[layer] for layer in self.layers], dim=-1)
            for row, i in enumerate(group):
                made[i] = caught[row, : len(sequences[i])].clone()
        return made


class HeadTraining(Resumable):
    """embedding: the target's, frozen, on the head's device."""

    def __init__(
        self,
        config: HeadTrainConfig,
        head: EagleHead,
        embedding: Tensor,
        target: FeatureTarget,
        total: int,
        show: Callable[[str], None],
    ) -> None:
        self.config, self.head, self.embedding, self.target = config, head, embedding, target
        optimizer = torch.optim.AdamW(
            head.parameters(), lr=config.rate, betas=(0.9, 0.95), weight_decay=config.weight_decay
        )
        super().__init__(config, head, optimizer, total, show)

    def train_group(self, sequences: Sequence[TrainingSequence]) -> None:
        began = time.monotonic()
        losses = self._losses(sequences)
        loss = torch.stack([self.config.decay**i * one for i, (one, _) in enumerate(losses)]).sum()
        agreed = ", ".join(f"{float(hits.float().mean()):.3f}" for _, hits in losses)
        self.take_step(loss, began, 0.5, f"loss {float(losses[0][0].detach()):.3f}, agreement by step {agreed}")

    def _losses(self, sequences: Sequence[TrainingSequence]) -> list[tuple[Tensor, Tensor]]:
        with torch.autocast(self.device, torch.bfloat16, enabled=self.device != "cpu"):
            batch = make_batch(sequences, self.target.features(sequences)).to(self.device)
            return step_losses(self.head, self.embedding, batch, self.config.steps, self.config.hard)

    @torch.no_grad()
    def agreement(self, data: Sequence[TrainingSequence]) -> list[float]:
        """By step: the share of the data's tokens that the head guesses."""
        steps = self.config.steps
        most = max(1, self.config.batch // max(len(one.prompt) + len(one.answer) for one in data))
        counts = torch.zeros(2, steps)
        for at in range(0, len(data), most):
            for step, (_, hits) in enumerate(self._losses(data[at : at + most])):
                counts[:, step] += torch.tensor([float(hits.sum()), len(hits)])
        return [round(float(hits / max(1.0, float(count))), 4) for hits, count in counts.T]


def new_head(target: Any, config: HeadTrainConfig, counts: Tensor, layers: tuple[int, ...]) -> EagleHead:
    """An untrained head: output rows of the target, a layer random by `config.seed`."""
    theirs = target.config
    theta = float((getattr(theirs, "rope_parameters", None) or {}).get("rope_theta", 10000.0))
    output = target.get_output_embeddings().weight.detach().float()
    ids = most_frequent(counts, config.vocabulary)
    torch.manual_seed(config.seed)
    head = EagleHead(
        HeadConfig(
            hidden_size=theirs.hidden_size,
            num_attention_heads=theirs.num_attention_heads,
            num_key_value_heads=getattr(theirs, "num_key_value_heads", None) or theirs.num_attention_heads,
            head_dim=getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads,
            intermediate_size=config.intermediate or theirs.intermediate_size,
            vocab_size=theirs.vocab_size,
            draft_vocab_size=len(ids),
            target_hidden_size=theirs.hidden_size,
            layers=layers,
            rms_norm_eps=theirs.rms_norm_eps,
            max_position_embeddings=theirs.max_position_embeddings,
            rope={"rope_type": "default", "rope_theta": theta},
        )
    )
    head.narrow_to(ids)
    head.lm_head.weight.data.copy_(output[ids])
    head.norm.weight.data.copy_(target.base_model.norm.weight.detach().float())
    return head


def train(config: HeadTrainConfig, show: Callable[[str], None]) -> dict[str, Any]:
    """Trains, writes config.output, returns its training.json. Raises ValueError."""
    from transformers import AutoModelForCausalLM

    from tandem.runners.load_runner import transformers_logging
    from tandem.runners.torch.platforms import choose_platform

    transformers_logging()
    checkpoint = unpacked(find(config.target_model))
    revision = weights_revision(checkpoint)
    target: Any = AutoModelForCausalLM.from_pretrained(**checkpoint.source, dtype=torch.float32)
    device = choose_platform(config.device).name
    taps = FeatureTarget(checkpoint.source, config.layers, device, max(config.batch, 2048))
    data, held_out = read_data(config.data, revision)
    counts, tokens = best_counts(data, 1, target.config.vocab_size), sum(len(one.answer) for one in data)
    head = new_head(target, config, counts, taps.layers).to(device)
    embedding: Tensor = target.get_input_embeddings().weight.detach().to(device)
    del target
    steps = max(1, round(config.epochs * tokens / config.batch))
    show(f"{tokens:,} tokens in {len(data):,} sequences, {head.config.draft_vocab_size:,} columns, "
         f"{sum(p.numel() for p in head.parameters()):,} parameters, about {steps:,} steps")  # fmt: skip
    training = HeadTraining(config, head, embedding, taps, steps, show)
    seconds = training.run(data)
    report = {
        "config": json.loads(json.dumps(asdict(config), default=str)),
        "target": revision,
        "target_name": checkpoint.name,
        "train_tokens": tokens,
        "train_sequences": len(data),
        "columns": head.config.draft_vocab_size,
        "layers": list(taps.layers),
        "steps": steps,
        "device": device if device == "cpu" else torch.cuda.get_device_name(),
        "seconds": round(seconds, 1),
        "held_out_agreement": training.agreement(held_out),
    }
    write_head(config.output, head.to("cpu", getattr(torch, config.dtype)))
    (config.output / "training.json").write_text(json.dumps(report, indent=2) + "\n")
    config.state.unlink(missing_ok=True)
    return report


def main(argv: Sequence[str] | None = None) -> int:
    def work(config: HeadTrainConfig) -> None:
        print(json.dumps(train(config, show)["held_out_agreement"]))
        measuring = "python compare_architectures.py --architectures autoregressive,fused --draft eagle --draft-model"
        print(f"wrote {config.output}; measure it with: {measuring} {config.output}")

    return run_command("Trains an EAGLE-3 head on what generate wrote.", HeadTrainConfig, argv, work)


if __name__ == "__main__":
    sys.exit(main())
