"""Finds, checks and reads weights and tokenizers."""
