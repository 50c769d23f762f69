"""Receipts: signed answers whose tokens anyone with the weights can check."""
