"""Trains draft models and EAGLE-3 heads."""
