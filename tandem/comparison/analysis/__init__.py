"""Turns records into metrics, predictions and decisions. Pure."""
