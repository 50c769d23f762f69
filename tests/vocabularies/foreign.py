"""Makes drafts with a foreign vocabulary of the shipped draft."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from tandem.checkpoints.locate import embedded_draft

SPECIAL = 17
"""The first ids of SmolLM2's vocabulary are special tokens."""


def write_foreign(folder: Path, tokens: int | None = None, padding: int = 0, weights: bool = True) -> Path:
    """Writes the shipped draft with its first `tokens` tokens, all if None, by other ids, and rows that are padding."""
    from safetensors.numpy import load_file, save_file

    source = Path(str(embedded_draft()))
    said = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary: dict[str, int] = said["model"]["vocab"]
    order = [token for token in vocabulary.values() if token < (tokens or len(vocabulary))]
    order = [*sorted(order)[:SPECIAL], *sorted(order)[: SPECIAL - 1 : -1]]  # the ordinary ones backwards
    place = {token: at for at, token in enumerate(order)}
    kept_tokens = {text: place[token] for text, token in vocabulary.items() if token in place}
    merges = [each.split(" ") if isinstance(each, str) else each for each in said["model"]["merges"]]
    merges = [each for each in merges if {*each, "".join(each)} <= kept_tokens.keys()]
    said["model"] |= {"vocab": kept_tokens, "merges": merges}
    config = json.loads((source / "config.json").read_text(encoding="utf-8")) | {"vocab_size": len(order) + padding}
    folder.mkdir(parents=True, exist_ok=True)
    if weights:
        tensors = load_file(source / "model.safetensors")
        rows = tensors["model.embed_tokens.weight"][order]
        tensors["model.embed_tokens.weight"] = np.concatenate([rows, np.zeros_like(rows[:padding])])
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "tokenizer.json").write_text(json.dumps(said), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    for name in ("tokenizer_config.json", "generation_config.json", "chat_template.jinja"):
        (folder / name).write_bytes((source / name).read_bytes())
    return folder
