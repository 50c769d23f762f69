"""The alphabet of byte-level vocabularies."""

from __future__ import annotations


def byte_characters() -> list[str]:
    """Returns the character of each byte in byte-level vocabularies (GPT-2's table)."""
    shown = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in shown else chr(next(others)) for byte in range(256)]
