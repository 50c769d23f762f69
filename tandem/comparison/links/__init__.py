"""Emulates a network link between client and servers, and measures what it adds."""
