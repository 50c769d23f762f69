"""Turns requests into steps of a device: generator, sequences, KV slots, batcher."""
