"""Runs the commands of README and of the pages for users as they are written, with the models and ports that they name.

    python -m tests.pages.walk [PAGE...]       # default: all of PAGES

Every page begins without servers. A command that starts a server starts it beside what follows, until another one takes
its port or the page ends; every other command must end with 0. Prints each command with `ran`, `elsewhere` or `failed`,
then those that run elsewhere with the reason (ELSEWHERE), and exits with 1 if one failed.
"""

from __future__ import annotations

import re
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tandem.cli import main as cli
from tests.pages.blocks import ROOT, Snippet, snippets_of
from tests.pages.desk import Desk

PAGES = (
    ROOT / "README.md",
    *(ROOT / "docs" / f"{name}.md" for name in ("tutorials", "openai", "python", "running", "receipts", "comparison")),
)

PLACEHOLDERS = {
    r"(?<=--draft-model )DIR\b|\bDRAFT_DIR\b|/models/Qwen3-0\.6B": "a draft of 2 layers over bytes",
    r"\bDIR\b|/models/Qwen3-4B": "a target of 2 layers over bytes (tests/recipes/models.py)",
    r"(?<!/)\bcomparison\.json\b": "the file of the comparison that ran last",
}
"""What stands in a page for a file of the reader's, and which file that is here. Nothing else of a command changes."""

INSTEAD = {"--device neuron": "--device cpu", "--tp_degree 4": "--tp_degree 2"}
"""Flags that need a device, and what a server has here in their place."""

ELSEWHERE = {
    r"make test\b": "the suite that this test belongs to; .ci/run runs it",
    r"make wheels": "needs the package index; tests/packaging/ builds the same wheels by packages/build.py",
    r"pip install ": "changes the environment; tests/packaging/ installs wheels in fresh ones, with and without extras",
    r"ssh ": "needs a second machine; the servers of both are on this one",
    r"python deploy/first-hour/first_hour\.py trn2\.3xlarge$": "needs a Trainium instance; --print runs here",
    r"python compare_architectures\.py --device neuron ": "needs a Trainium or Inferentia instance",
    r"python compare_architectures\.py --backend nxdi ": "needs a Trainium or Inferentia instance",
}
"""Commands that this machine cannot run, or that run in another place, by how they begin. All are parsed by
tests/test_readme.py."""

SHORT = "--prompts-per-workload 1 --max-new-tokens 8"
"""What the comparison's page says makes a comparison short: added to each one; to own prompts only the second half."""
SHORT_LOAD = "--max-num-completed-requests 2"
"""The same for each load, by the page's table of flags."""
COMPARISON = re.compile(r"(?:make compare|python compare_architectures\.py|tandem compare)\b")
SERVERS = ("target", "fused_target", "draft_worker", "prefill", "serve")


@dataclass(frozen=True)
class Step:
    snippet: Snippet
    verdict: str
    how: str
    seconds: float

    def __str__(self) -> str:
        return f"  {self.verdict:9} {self.seconds:5.1f} s  {self.snippet.title}{self.how and f' ({self.how})'}"


def walk(page: Path, folder: Path, done: set[str]) -> Iterator[Step]:
    """Runs a page in `folder`. `done`: comparisons of earlier pages, which are not run again."""
    with Desk(folder) as desk:
        for snippet in snippets_of(page):
            began = time.monotonic()
            try:
                verdict, how = _step(snippet, desk, done)
            except (Exception, SystemExit) as error:
                verdict, how = "failed", f"{type(error).__name__}: {error}"
            yield Step(snippet, verdict, how, time.monotonic() - began)


def _step(snippet: Snippet, desk: Desk, done: set[str]) -> tuple[str, str]:
    if snippet.kind == "python":
        desk.run(["python", "-"], snippet.text)
        return "ran", ""
    if reason := why_elsewhere(snippet.text):
        return "elsewhere", reason
    line = desk.with_files(snippet.text, PLACEHOLDERS)
    if COMPARISON.match(line):
        if snippet.text in done:
            return "ran", "on an earlier page"
        desk.run(["bash", "-c", shortened(line)])
        done.add(snippet.text)
    elif ports := ports_of(line):
        here = line
        for flag, other in INSTEAD.items():
            here = here.replace(flag, other)
        desk.serve(here, *ports)
        return "ran", "" if here == line else "with the CPU in the device's place"
    else:
        said = desk.run(["bash", "-c", line])
        assert not line.startswith("curl ") or '"error"' not in said, said
    return "ran", ""


def why_elsewhere(line: str) -> str:
    return next((reason for begins, reason in ELSEWHERE.items() if re.match(begins, line)), "")


def shortened(line: str) -> str:
    more = SHORT[SHORT.index("--max-new") :] if "--prompt-file" in line else SHORT
    more += f" {SHORT_LOAD}" if "--concurrency" in line or "--rate" in line else ""
    if not line.startswith("make "):
        return f"{line} {more}"
    return f'{line.removesuffix(chr(34))} {more}"' if "ARGS=" in line else f'{line.partition("#")[0]} ARGS="{more}"'


def ports_of(line: str) -> tuple[int, int] | None:
    """The ports for gRPC and HTTP of the server that a command starts (0: none); None if it starts none."""
    words = shlex.split(line, comments=True)
    if words[:2] == ["make", "serve"]:
        arguments = ["serve"]
    elif words[:2] == ["python", "main.py"]:
        arguments = words[2:]
    elif words[0] == "tandem":
        arguments = words[1:]
    else:
        return None
    args = cli.parser().parse_args(cli.with_role(arguments))
    if args.role not in SERVERS:
        return None
    return args.port, args.http_port or (8080 if args.role == "serve" else 0)


def main(arguments: list[str]) -> int:
    done: set[str] = set()
    steps = []
    for page in [Path(name).resolve() for name in arguments] or PAGES:
        print(page.relative_to(ROOT) if page.is_relative_to(ROOT) else page, flush=True)
        with tempfile.TemporaryDirectory() as folder:
            for step in walk(page, Path(folder), done):
                steps.append(step)
                print(step, flush=True)
    print("not run by this walk:")
    for step in steps:
        if step.verdict == "elsewhere":
            print(f"  {step.snippet.title.partition(' #')[0].strip()}: {step.how}")
    counts = {verdict: sum(step.verdict == verdict for step in steps) for verdict in ("ran", "elsewhere", "failed")}
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
    return int(counts["failed"] > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
