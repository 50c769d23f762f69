"""Emulates a network link and measures its overhead."""
