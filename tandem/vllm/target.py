"""vLLM's model: sizes and, from local files, its tokenizer."""

from __future__ import annotations

import logging
from typing import Any

from tandem.vllm.workers import Target

log = logging.getLogger("tandem.vllm")


def target_of(vllm_config: Any, tokenizer_sha256: str | None) -> Target:
    """Reads vLLM's configuration. `tokenizer_sha256` None: from local files."""
    model = vllm_config.model_config
    if tokenizer_sha256 is None:
        tokenizer_sha256 = _fingerprint(str(getattr(model, "tokenizer", None) or model.model))
    return Target(
        int(model.get_vocab_size()),
        int(model.max_model_len),
        int(vllm_config.speculative_config.num_speculative_tokens),
        tokenizer_sha256,
    )


def _fingerprint(name: str) -> str:
    try:
        from tandem.checkpoints.locate import find
        from tandem.checkpoints.tokenizers import HuggingFaceTokenizer

        return HuggingFaceTokenizer(find(name)).sha256
    except Exception as error:  # not found, or in a form that only vLLM reads: sizes are compared instead
        log.info("the tokenizer of %s is not compared with the workers', only its size: %s", name, error)
        return ""
