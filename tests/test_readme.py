"""Links between pages lead somewhere, and the files that they name are there."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tandem.engine.compatibility import ASKED, EXCLUDED

ROOT = Path(__file__).resolve().parents[1]
EVERY_PAGE = (
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    ROOT / "benchmarks" / "README.md",
    ROOT / "deploy" / "README.md",
)
LINK = re.compile(r"\]\(([^)#:\s]+)(?:#([^)\s]+))?\)|\]\(#([^)\s]+)\)")


def test_the_page_lists_all_that_excludes_something() -> None:
    lines = []
    for trait, reasons in EXCLUDED.items():
        lines.append(f"- {trait.value}\n")
        lines += [f"    - {ASKED[field][1]}: {why}\n" for field, why in reasons.items()]
    wanted = re.sub(r"--[a-z][\w-]*", r"`\g<0>`", "".join(lines))
    assert wanted in (ROOT / "docs" / "running.md").read_text(encoding="utf-8"), wanted


def test_the_readmes_first_request_is_streamed_and_ends_soon_and_always_alike() -> None:
    (asked,) = re.findall(r"^    -d '(.*)'$", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert json.loads(asked).items() >= {"max_tokens": 64, "temperature": 0, "stream": True}.items()


def anchors(page: Path) -> set[str]:
    """Headings of a page, as GitHub makes anchors of them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_between_pages_lead_somewhere() -> None:
    broken = []
    for page in EVERY_PAGE:
        for file, anchor, own in LINK.findall(page.read_text(encoding="utf-8")):
            target = (page.parent / file).resolve() if file else page
            if not target.exists() or ((anchor or own) and (anchor or own) not in anchors(target)):
                broken.append(f"{page.relative_to(ROOT)}: {file}#{anchor or own}")
    assert broken == []


def test_a_file_that_a_page_names_is_there() -> None:
    named = re.compile(r"`((?:tandem|services|clients|tests|benchmarks|docs|deploy|proto|examples)/[\w./-]*)`")
    missing = [
        f"{page.relative_to(ROOT)}: {path}"
        for page in EVERY_PAGE
        for path in sorted(set(named.findall(page.read_text("utf-8"))))
        if not (ROOT / path).exists()
    ]
    assert missing == []
