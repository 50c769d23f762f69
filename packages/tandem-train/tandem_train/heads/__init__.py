"""EAGLE-3 heads: features and training."""
