"""Describes what a server runs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Rehearsal:
    """A model whose steps take the times of a device that is not here. The counts rise while it runs.

    `part`: target or draft. `late_steps` ended `late_seconds` later, together, than that device's would have.
    """

    part: str
    name: str
    device: str
    source: str
    steps: int = 0
    late_steps: int = 0
    late_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Describes the model that a server runs; proto/tandem/v1/generation.proto defines the fields.

    `adapters`: name and revision of each. `arithmetic`: what bits depend on besides weights and number format.
    """

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
    adapters: tuple[tuple[str, str], ...] = ()
    feature_layers: tuple[int, ...] = ()
    feature_size: int = 0
    rehearsals: tuple[Rehearsal, ...] = ()
    arithmetic: str = ""
    receipt_key: str = ""
    max_unread_tokens: int = 0
