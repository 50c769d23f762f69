"""docs/seeds.md: every section of the seeds has a row, every row an answer, and every command there is understood."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.recipes import ours, programs
from tests.recipes.page import ROOT, Command

PAGE = ROOT / "docs" / "seeds.md"
SEEDS = ROOT.parent / "shared" / "seeds"
DOCUMENTS = {
    "The project before: distributed and fused on trn1.2xlarge": "choral-spec-readme.md",
    "Qwen3-32B on EKS": "eks-trn2-vllm-speculation.md",
    "Llama-3.1-405B on trn2.48xlarge": "nxdi-llama3.1-405b-fused-speculation.rst",
    "Qwen3-32B on trn2.48xlarge": "nxdi-qwen3-32b-speculation.rst",
    "NxD Inference's features": "nxdi-features-guide.rst",
}
FIGURES = {  # what the seeds measured or claim, as our pages have it
    "choral-spec-readme.md": "34.15 19.36 71.07 48 1.41 2582.84",
    "nxdi-llama3.1-405b-fused-speculation.rst": "25.5 2.44 37.9 70.1 102.4 2.25 8.3 14.7 2442 2255",
    "nxdi-qwen3-32b-speculation.rst": "102.3 48.3 6.04 137.8 47.4 5.64 558 565 35 7",
    "nxdi-features-guide.rst": "16 24 148 20 23 12 4 2 376 188 77 38",
    "eks-trn2-vllm-speculation.md": "32 64 600 1024 190",
}
PROGRAMS = ("python", "torchrun", "source", *{name.split()[0] for name in programs.KNOWN})
SECTION = re.compile(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
SECTIONS = dict(SECTION.findall(PAGE.read_text(encoding="utf-8")))


def rows(heading: str) -> list[tuple[str, str]]:
    """Of a section's table: what the seed has, and what is here."""
    lines = [line for line in SECTIONS[heading].splitlines() if line.startswith("| ")][1:]
    return [(line.strip("| ").split(" | ")[0], " | ".join(line.strip("| ").split(" | ")[1:])) for line in lines]


ROWS = [row for heading in DOCUMENTS for row in rows(heading)]
COMMANDS = [
    Command(PAGE, code)
    for _, here in ROWS
    for code in re.findall(r"`([^`]+)`", here)
    if code.split()[0] in PROGRAMS and len(code.split()) > 1
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.line[:60])
def test_a_command_of_a_row_is_understood(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    checked = ours.check(command, monkeypatch) if command.program.endswith(".py") else programs.check(command.words)
    assert checked


def test_every_row_has_an_answer_and_what_it_names_is_there() -> None:
    assert set(SECTIONS) == set(DOCUMENTS) and len(ROWS) > 100 and len(COMMANDS) > 35
    for seed, here in ROWS:
        assert seed and here, (seed, here)
        for target in re.findall(r"\]\(([^)#]+)", here):
            assert (PAGE.parent / target).is_file(), target
        for file in re.findall(r"`((?:deploy|docs|tests|proto)/[\w./-]+|overlays/[\w-]+)`", here):
            assert ((ROOT / "deploy/k8s" if file.startswith("overlays") else ROOT) / file).exists(), file


def headings(file: Path) -> list[str]:
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".md":
        found = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    else:
        found = re.findall(r"^(\S.*)\n([-=~^])\2{3,} *$", text, re.MULTILINE)
        found = [title for title, _ in found]
    return [re.sub(r"[*`:]|\\", "", title).strip() for title in found]


@pytest.mark.skipif(not SEEDS.is_dir(), reason="the seeds' texts lie beside ours in no other clone")
@pytest.mark.parametrize(("section", "name"), DOCUMENTS.items())
def test_every_section_of_a_seed_has_a_row(section: str, name: str) -> None:
    found = headings(SEEDS / name)
    said = re.sub(r"[*`:]", "", " / ".join(seed for seed, _ in rows(section)))
    assert len(found) > 12
    assert [title for title in found if title not in said] == []


def plain(text: str) -> str:
    """Returns the text in lower case, without quotes, and with hyphens in place of dashes."""
    return re.sub("[\"':,]", "", text.replace("\u2014", "-").lower())


@pytest.mark.skipif(not SEEDS.is_dir(), reason="the seeds' texts lie beside ours in no other clone")
@pytest.mark.parametrize(("section", "name"), DOCUMENTS.items())
def test_what_a_row_quotes_is_in_its_seed(section: str, name: str) -> None:
    text = plain((SEEDS / name).read_text(encoding="utf-8"))
    quoted = [q for seed, _ in rows(section) for pair in re.findall(r'`([^`]+)`|"([^"]+)"', seed) for q in pair if q]
    words = {word for quote in quoted for word in plain(quote).split()}
    assert len(words) > 5
    assert [word for word in words if not re.search(re.escape(word).replace(r"\*", ".*"), text)] == []


@pytest.mark.parametrize(("section", "name"), DOCUMENTS.items())
def test_every_figure_of_a_seed_is_said(section: str, name: str) -> None:
    said = "".join(f"{seed} {here} " for seed, here in rows(section))
    assert [f for f in FIGURES[name].split() if not re.search(rf"(?<![\d.]){re.escape(f)}(?![\d]|\.\d)", said)] == []
