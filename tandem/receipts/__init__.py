"""Receipts: what a server signs of an answer, so that a stranger with the same weights can check every token."""
