"""The documentation site builds without a warning, its links lead somewhere, and reading it asks no other server."""

from __future__ import annotations

import re
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest

from tests.support import REPOSITORY

pytestmark = [pytest.mark.docs, pytest.mark.timeout(300)]
PYTHON = REPOSITORY / ".venv-docs" / "bin" / "python"
SITE = REPOSITORY / "build" / "site"


class Page(HTMLParser):
    """What a page links to, what it loads, and the places in it."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.places: set[str] = set()
        self.feed(file.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.places.add(values.get("id", ""))
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        self.loads += [values[name] for name in ("src", "href") if name in values and tag in ("script", "img", "link")]


@pytest.fixture(scope="module")
def pages() -> dict[Path, Page]:
    build = [PYTHON, "-m", "mkdocs", "build", "--strict"]
    done = subprocess.run(build, cwd=REPOSITORY, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return {file: Page(file) for file in SITE.rglob("*.html") if file.name != "404.html"}


def target_of(link: str, page: Path) -> tuple[Path, str]:
    path, _, place = unquote(link).partition("#")
    target = (page.parent / path).resolve() if path else page
    return (target / "index.html" if target.is_dir() else target), place


def test_every_link_of_every_page_leads_to_a_file_and_a_place_in_it(pages: dict[Path, Page]) -> None:
    broken = []
    for file, page in pages.items():
        for link in (*page.links, *page.loads):
            if link.startswith(("https:", "http:", "javascript:")):
                continue
            target, place = target_of(link, file)
            if not target.is_file() or (place and target in pages and place not in pages[target].places):
                broken.append(f"{file.relative_to(SITE)}: {link}")
    assert len(pages) > 30 and broken == []


def test_reading_a_page_loads_nothing_from_elsewhere(pages: dict[Path, Page]) -> None:
    elsewhere = {url for page in pages.values() for url in page.loads if re.match(r"(https?:)?//", url)}
    assert elsewhere == set()


def test_language_models_find_every_page_as_markdown(pages: dict[Path, Page]) -> None:
    listed = re.findall(r"^- \[.+\]\(([^)]+)\)", (SITE / "llms.txt").read_text(encoding="utf-8"), re.MULTILINE)
    written = {str(file.relative_to(SITE)) for file in SITE.rglob("*.md")}
    assert len(set(listed)) == len(listed) and written - set(listed) == {"pages.md"}
    whole = (SITE / "llms-full.txt").read_text(encoding="utf-8")
    assert all(f"<!-- {address} -->" in whole for address in listed)
    source = (REPOSITORY / "docs" / "sessions.md").read_text(encoding="utf-8")
    assert source.partition("\n")[0] in whole and "](security.md#" in (SITE / "sessions.md").read_text("utf-8")


def test_githubs_workflows_have_githubs_schema() -> None:
    """The schema that check-jsonschema brings with it."""
    files = sorted((REPOSITORY / ".github" / "workflows").glob("*.yml"))
    check = [PYTHON.with_name("check-jsonschema"), "--builtin-schema", "vendor.github-workflows", *files]
    done = subprocess.run(check, capture_output=True, text=True, timeout=60, check=False)
    assert files and done.returncode == 0, done.stdout
