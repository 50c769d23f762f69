"""Starts servers and measures every architecture on the same requests."""
