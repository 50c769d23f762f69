"""Model execution: runners, the slot KV cache, the batcher, checkpoints and tokenizers."""
