"""Text from outside made fit for logs, errors and terminals: one line, nothing that moves a cursor, not too long."""

from __future__ import annotations

MOST_BYTES = 600
"""Of a message in a status, which holds it three times: all trailing metadata has to stay below 8 KiB."""
_CUT = " ..."


def printable(text: str, most: int | None = MOST_BYTES) -> str:
    """`text` with what is not printable escaped, as \\n, and cut after `most` bytes of UTF-8; None: not cut."""
    if most is not None and len(text) > most:
        text = text[: most + 1]  # escapes only add to it, and text may be megabytes
    if not text.isprintable():
        text = "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)
    if most is None or len(text.encode()) <= most:
        return text
    return text.encode()[: most - len(_CUT)].decode(errors="ignore") + _CUT
