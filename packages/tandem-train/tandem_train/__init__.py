"""Trains EAGLE-3 heads."""
