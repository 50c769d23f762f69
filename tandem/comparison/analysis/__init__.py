"""Turns records into metrics, predictions and decisions, without side effects."""
