"""EAGLE-3 heads: features, training, evaluation."""
