"""Finds and reads weights and tokenizers."""
