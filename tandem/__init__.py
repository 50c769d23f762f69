"""Speculative decoding across a network."""
