"""The commands and programs of a page, in the order in which a reader meets them."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RECIPES = tuple(sorted((ROOT / "docs/recipes").glob("*.md")))
BLOCK = re.compile(r"^ *```(bash|python|text)\n(.*?)```", re.DOTALL | re.MULTILINE)
ASSIGNMENT = re.compile(r"([A-Z][A-Z0-9_]*)=(\S+)")
OURS = ("main.py", "compare_architectures.py")


@dataclass(frozen=True)
class Command:
    """A command of a bash block, or a whole python block."""

    page: Path
    line: str
    kind: str = "bash"

    @property
    def title(self) -> str:
        return self.line if self.kind == "bash" else f"python: {self.line.strip().splitlines()[-1].strip()}"

    @property
    def all_words(self) -> list[str]:
        return shlex.split(self.line, comments=True)

    @property
    def variables(self) -> dict[str, str]:
        """Assignments before the program."""
        found: dict[str, str] = {}
        for word in self.all_words:
            if (match := ASSIGNMENT.fullmatch(word)) is None:
                break
            found[match[1]] = match[2]
        return found

    @property
    def words(self) -> list[str]:
        return self.all_words[len(self.variables) :]

    @property
    def program(self) -> str:
        """main.py, compare_architectures.py, or the name of another program."""
        return next((word for word in self.words if word in OURS), self.words[0])

    @property
    def launcher(self) -> list[str]:
        """The words before our own program."""
        return self.words[: self.words.index(self.program)]

    @property
    def arguments(self) -> list[str]:
        return self.words[self.words.index(self.program) + 1 :]

    @property
    def instance(self) -> str:
        return "trn1.2xlarge" if "trn1" in self.page.stem else "trn2.48xlarge"


def commands_of(page: Path) -> list[Command]:
    found = []
    for kind, block in BLOCK.findall(page.read_text(encoding="utf-8")):
        if kind == "python":
            found.append(Command(page, block, kind))
        elif kind == "bash":
            lines = map(str.strip, re.sub(r"\\\n\s*", "", block).splitlines())
            found += [Command(page, line) for line in lines if line and not line.startswith("#")]
    return found
