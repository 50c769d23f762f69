"""Encodes text as a target does, for callers that send token ids."""

from __future__ import annotations

from tandem.checkpoints.tokenizers import HuggingFaceTokenizer
from tandem.checkpoints.tokenizers import Tokenizer as Tokenizer
from tandem.runners.backends import backend_named


def target_tokenizer(backend: str, model: str | None) -> Tokenizer:
    """Returns the tokenizer of a target; None is the default model. Raises ValueError, one line."""
    chosen = backend_named(backend)
    checkpoint = chosen.find(model)
    return chosen.tokenizer(checkpoint) or HuggingFaceTokenizer(checkpoint)
