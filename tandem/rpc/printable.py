"""Makes untrusted text safe for logs, errors and terminals."""

from __future__ import annotations

MAX_BYTES = 600
"""A status has its message three times, and all trailing metadata must fit in 8 KiB."""
_CUT = " ..."


def printable(text: str, most: int | None = MAX_BYTES) -> str:
    """Escapes unprintable characters and truncates to `most` bytes of UTF-8; None: no limit."""
    if most is not None and len(text) > most:
        text = text[: most + 1]  # escaping only lengthens it, and the text may be megabytes long
    if not text.isprintable():
        text = "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)
    if most is None or len(text.encode()) <= most:
        return text
    return text.encode()[: most - len(_CUT)].decode(errors="ignore") + _CUT
