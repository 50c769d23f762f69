"""Digests of a prompt, and of every committed prefix after it."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

EVERY = 64
"""A receipt has the digest of the prefix after so many tokens of output, after twice as many, ..., and of all."""
SALT_BYTES = 32
_PROMPT = b"tandem-receipt-prompt-v1\0"


def prompt_digest(salt: bytes, prompt: Sequence[int]) -> bytes:
    """Returns SHA-256 of a label, the salt and the prompt's token ids, each as 4 bytes, little-endian.

    Who has not the salt cannot try prompts.
    """
    return hashlib.sha256(_PROMPT + salt + struct.pack(f"<{len(prompt)}I", *prompt)).digest()


def prefix_digests(prompt: bytes, tokens: Sequence[int]) -> tuple[bytes, ...]:
    """Returns the digests of the prefixes that a receipt has.

    That of a prefix is SHA-256 of the digest of the prefix before, at first the prompt's, and the token's 4 bytes.
    """
    found, digest = [], prompt
    for count, token in enumerate(tokens, 1):
        digest = hashlib.sha256(digest + struct.pack("<I", token)).digest()
        if count % EVERY == 0 or count == len(tokens):
            found.append(digest)
    return tuple(found)
