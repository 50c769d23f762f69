"""What a server runs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Rehearsal:
    """A model whose steps take the times of another device, and the steps that were slower than that."""

    part: str  # target or draft
    name: str
    device: str
    source: str
    steps: int = 0
    late_steps: int = 0
    late_seconds: float = 0.0  # in all


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A server's model; proto/tandem/v1/generation.proto defines the fields."""

    model_name: str
    weights_revision: str
    tokenizer_sha256: str
    vocab_size: int
    max_sequence_length: int
    max_speculation_length: int
    kv_slots: int
    dtype: str
    device: str
    backend: str
    draft_name: str = ""
    default_speculation_length: int = 0
    plain_width: int = 1
    bit_exact: bool = True
    startup_seconds: float = 0.0
    end_of_sequence_ids: tuple[int, ...] = ()
    adaptive_speculation_length: bool = False
    adapters: tuple[tuple[str, str], ...] = ()  # name, revision
    feature_layers: tuple[int, ...] = ()
    feature_size: int = 0
    rehearsals: tuple[Rehearsal, ...] = ()
    arithmetic: str = ""  # decides bits besides weights and number format
    receipt_key: str = ""
    max_unread_tokens: int = 0
