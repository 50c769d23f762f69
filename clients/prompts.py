"""Reads prompt files: one prompt per line."""

from __future__ import annotations

from pathlib import Path


def read_prompts(path: Path) -> tuple[tuple[int, str], ...]:
    """Returns line numbers from 1 and non-empty lines. Raises ValueError."""
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except FileNotFoundError:
        raise ValueError(f"prompt file {path} does not exist") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"prompt file {path} is not UTF-8 text: {error.reason} at byte {error.start}") from None
    except OSError as error:
        raise ValueError(f"prompt file {path} cannot be read: {error.strerror}") from None
    found = tuple((number, line.strip()) for number, line in enumerate(lines, 1) if line.strip())
    if not found:
        raise ValueError(f"prompt file {path} is empty: write one prompt per line")
    return found
