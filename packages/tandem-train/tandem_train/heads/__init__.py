"""Makes and judges EAGLE-3 heads: features, train, evaluate."""
