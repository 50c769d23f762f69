"""EAGLE-3 heads: one decoder layer over the target's hidden states."""
