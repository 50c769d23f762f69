"""The tables of flags in the pages are made of the options' declarations: `python -m tests.flag_tables` writes them.

A comment such as `<!-- flags: queue timeout -->`, or `<!-- flags of compare: rate -->`, stands before each table. What
excludes what, after `<!-- exclusions -->`, is made of the table in tandem/engine/compatibility.py.
"""

from __future__ import annotations

import re

from tandem.cli.compare_flags import COMPARE_FLAGS
from tandem.cli.flags import FLAGS
from tandem.cli.option import Flag, spelled
from tandem.engine.compatibility import ASKED, EXCLUDED
from tests.support import REPOSITORY

TABLE = re.compile(r"^(<!-- flags( of compare)?: ([\w ]+) -->\n)(?:\|.*\n)*", re.MULTILINE)
EXCLUSIONS = re.compile(r"^(<!-- exclusions -->\n)(?: *- .*\n|\|.*\n)*", re.MULTILINE)
FLAG = re.compile(r"--[a-z][\w-]*")
PAGES = sorted((REPOSITORY / "docs").rglob("*.md"))


def row(flag: Flag, compare: bool) -> str:
    value = " ".join([spelled(flag.spellings()[0], compare), *filter(None, [flag.options.get("metavar")])])
    return " | ".join(text.replace("|", r"\|") for text in (f"`{value}`", FLAG.sub(r"`\g<0>`", flag.help)))


def with_tables(page: str) -> str:
    """The page with its tables written anew."""

    def table(found: re.Match[str]) -> str:
        flags, compare = (COMPARE_FLAGS, True) if found[2] else (FLAGS, False)
        rows = ["flag | what it does", "---|---", *(row(flags[name], compare) for name in found[3].split())]
        return found[1] + "".join(f"| {line} |\n".replace("| ---|--- |", "|---|---|") for line in rows)

    excluded = FLAG.sub(r"`\g<0>`", exclusions())
    return EXCLUSIONS.sub(lambda found: found[1] + excluded, TABLE.sub(table, page))


def exclusions() -> str:
    """The Markdown list of all that is excluded: an item for each way to run a model."""
    lines = []
    for trait, reasons in EXCLUDED.items():
        lines.append(f"- {trait.value}")
        lines += [f"    - {ASKED[field][1]}: {why}" for field, why in reasons.items()]
    return "\n".join(lines) + "\n"


def main() -> None:
    for path in PAGES:
        path.write_text(with_tables(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
