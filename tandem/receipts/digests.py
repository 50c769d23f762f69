"""Digests of a prompt and of committed prefixes."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

EVERY = 64  # output tokens between digests
SALT_BYTES = 32
_PROMPT = b"tandem-receipt-prompt-v1\0"


def prompt_digest(salt: bytes, prompt: Sequence[int]) -> bytes:
    """Returns SHA-256 of label, salt and ids (little-endian uint32); without the salt nobody can guess prompts."""
    return hashlib.sha256(_PROMPT + salt + struct.pack(f"<{len(prompt)}I", *prompt)).digest()


def prefix_digests(prompt: bytes, tokens: Sequence[int]) -> tuple[bytes, ...]:
    """Chains SHA-256(digest, token as 4 bytes) from the prompt's; returns every EVERYth and the last."""
    found, digest = [], prompt
    for count, token in enumerate(tokens, 1):
        digest = hashlib.sha256(digest + struct.pack("<I", token)).digest()
        if count % EVERY == 0 or count == len(tokens):
            found.append(digest)
    return tuple(found)
