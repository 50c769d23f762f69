"""Encodes text as a target does."""

from __future__ import annotations

from tandem.checkpoints.tokenizers import HuggingFaceTokenizer
from tandem.checkpoints.tokenizers import Tokenizer as Tokenizer
from tandem.runners.backends import backend_named


def target_tokenizer(backend: str, model: str | None) -> Tokenizer:
    """Returns a target's tokenizer; None: the default model's. Raises ValueError."""
    chosen = backend_named(backend)
    checkpoint = chosen.find(model)
    return chosen.tokenizer(checkpoint) or HuggingFaceTokenizer(checkpoint)
