"""Drafts with an EAGLE-3 head: one decoder layer that reads its target's hidden states."""
