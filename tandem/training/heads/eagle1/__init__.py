"""Makes and judges EAGLE-1 heads, which NxD Inference serves: train, evaluate."""
