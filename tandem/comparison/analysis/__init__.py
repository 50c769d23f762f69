"""Computes metrics, predictions and decisions from records, without side effects."""
