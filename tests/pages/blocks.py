"""The commands and programs of a page, in the order in which a reader meets them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"```(bash|python)\n(.*?)```", re.DOTALL)


@dataclass(frozen=True)
class Snippet:
    """One command of a bash block, or a whole python block."""

    page: Path
    kind: str
    text: str

    @property
    def title(self) -> str:
        return self.text if self.kind == "bash" else f"python: {self.text.strip().splitlines()[-1].strip()}"


def snippets_of(page: Path) -> Iterator[Snippet]:
    for kind, block in BLOCK.findall(page.read_text(encoding="utf-8")):
        for text in commands_in(block) if kind == "bash" else [block]:
            yield Snippet(page, kind, text)


def commands_in(block: str) -> list[str]:
    """The commands of a bash block; a line that ends with a backslash goes on in the next one."""
    joined = re.sub(r"\\\n\s*", "", block)
    return [line for line in joined.splitlines() if line.strip() and not line.startswith("#")]
