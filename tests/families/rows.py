"""The table of models (rows.json): families and variants, each made small and random by transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

LENGTH = 240  # positions that are served, unless a row says less
TABLE: Mapping[str, Any] = json.loads(Path(__file__).with_name("rows.json").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Row:
    """A model: its family (the model_type), its variant, and what differs from the common sizes.

    `like`: the sets of fields that rows share. `shards`: bytes of a file of weights at most. `dtype`: of the weights as
    stored. `within`: the sequence length that is served. `gguf`: whether it has GGUF files.
    """

    family: str
    variant: str
    like: tuple[str, ...] = ()
    changes: Mapping[str, Any] = field(default_factory=dict)
    shards: str = ""
    dtype: str = "float32"
    within: int = LENGTH
    gguf: bool = False

    @property
    def name(self) -> str:
        return f"{self.family} {self.variant}"

    @property
    def differs(self) -> dict[str, Any]:
        """The fields that differ from the common sizes."""
        shared = (TABLE["shared"][name] for name in self.like)
        return {name: value for each in (*shared, self.changes) for name, value in each.items()}


ROWS = tuple(Row(**each) for each in TABLE["rows"])


def made(row: Row, folder: Path) -> Any:
    """Writes the row's model to `folder`; returns it in float32, as transformers reads it from there."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = CONFIG_MAPPING["llama" if row.family == "nonesuch" else row.family]
    known = {each.name for each in fields(kind)} | {"rope_parameters", *kind.attribute_map, *row.changes}
    config = kind(**{name: value for name, value in {**TABLE["sizes"], **row.differs}.items() if name in known})
    module = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    chance = torch.Generator().manual_seed(len(row.name))
    for name, parameter in module.named_parameters():  # norms start as 1, biases as 0: it would hide that they are lost
        tied = config.tie_word_embeddings and "embed" in name  # large ones would repeat the last token for ever
        drawn = (0.05 if tied else 0.25) * torch.randn(parameter.shape, generator=chance)
        parameter.data = parameter.data * (parameter.ndim == 1) + drawn
    module = module.to(getattr(torch, row.dtype))
    module.save_pretrained(folder, **({"max_shard_size": row.shards} if row.shards else {}))
    read = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    if row.family == "nonesuch":
        file = folder / "config.json"
        file.write_text(file.read_text().replace('"model_type": "llama"', '"model_type": "nonesuch"'))
    return read
