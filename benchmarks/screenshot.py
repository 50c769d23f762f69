"""Takes pictures with chromium: of a report, wide, dark and narrow (`make screenshot`), or of a server's chat page."""

from __future__ import annotations

import argparse
import io
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.chromium import Page, browser, opened

VIEWS: dict[str, tuple[tuple[int, int], bool]] = {  # size in CSS pixels, and dark mode
    "report.png": ((1400, 1000), False),
    "report-dark.png": ((1400, 1000), True),
    "report-390.png": ((390, 1560), False),
}
COLORS = 128
CHAT_SIZE = (900, 780)
QUESTION, MOST_TOKENS = "Write a Python function that returns the sum of a list of numbers.", 160


def newest_report(results: Path) -> Path | None:
    found = sorted(results.glob("*/report.html"), key=lambda path: path.stat().st_mtime)
    return found[-1] if found else None


def pictures_of_report(page: Page, report: Path) -> dict[str, bytes]:
    made = {}
    for name, (size, dark) in VIEWS.items():
        page.show(report.resolve().as_uri(), size, dark)
        made[name] = page.picture()
    return made


def pictures_of_chat(page: Page, url: str, question: str) -> dict[str, bytes]:
    """Asks a server's chat page and waits for the whole answer."""
    page.show(url, CHAT_SIZE)
    page.wait_for("document.getElementById('state').textContent.includes('ready')")
    page.run(f"document.getElementById('prompt').value = {json.dumps(question)}")
    for option, value in (("temperature", 0), ("max_tokens", MOST_TOKENS)):
        page.run(f"document.getElementById('{option}').value = {value}")
    page.run("document.getElementById('send').click()")
    page.wait_for("document.querySelector('.figures') !== null && document.getElementById('stop').disabled")
    page.run("window.scrollTo(0, 0)")
    return {"chat.png": page.picture()}


def small(picture: bytes) -> bytes:
    """Returns the picture with a palette, a third of its bytes."""
    from PIL import Image

    out = io.BytesIO()
    Image.open(io.BytesIO(picture)).convert("RGB").quantize(COLORS, Image.Quantize.FASTOCTREE).save(
        out, "png", optimize=True
    )
    return out.getvalue()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.screenshot", description=__doc__)
    parser.add_argument("report", nargs="?", type=Path, help="a report.html; the newest of results/ if none is named")
    parser.add_argument("--chat", metavar="URL", help="instead, ask the chat page of a running server a question")
    parser.add_argument("--question", default=QUESTION)
    parser.add_argument("--output-dir", type=Path, default=Path("docs"))
    args = parser.parse_args(arguments)
    report: Path | None = None if args.chat else args.report or newest_report(Path("results"))
    if not args.chat and not (report and report.is_file()):
        print(f"screenshot: {report or 'results/*/report.html'} is not there; run make compare first", file=sys.stderr)
        return 2
    executable = browser()
    if executable is None:
        print("screenshot: needs chromium (Debian and Ubuntu: apt install chromium)", file=sys.stderr)
        return 2
    try:
        with opened(executable) as page:
            made = pictures_of_report(page, report) if report else pictures_of_chat(page, args.chat, args.question)
    except RuntimeError as error:
        print(f"screenshot: {executable} failed: {error}", file=sys.stderr)
        return 1
    args.output_dir.mkdir(parents=True, exist_ok=True)
    for name, picture in made.items():
        (args.output_dir / name).write_bytes(small(picture))
        print(args.output_dir / name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
