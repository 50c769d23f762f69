"""`make families`: tiny models of every family against transformers, and llama.cpp where it is installed."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path

from tests.families import gguf_files, page
from tests.families.checks import Result
from tests.families.matrix import LlamaCpp, matrix
from tests.families.rows import ROWS

COLUMNS = ("family", "variant", "file", "formats", "runs", "exact", "verdict", "said")
HOW = "make families ARGS=--record: keys and added tensors of files that llama.cpp's convert_hf_to_gguf.py wrote"
WIDTHS = (17, 19, 17, 15, 12, 6, 10, 0)


def line(result: Result) -> str:
    cells = [str(getattr(result, name)) for name in COLUMNS]
    return " ".join(cell.ljust(width) for cell, width in zip(cells, WIDTHS, strict=True)).rstrip()


def main() -> int:
    parser = argparse.ArgumentParser(prog="make families ARGS=...", description=__doc__)
    parser.add_argument("--family", action="append", help="run this family alone; may be given again")
    parser.add_argument("--json", type=Path, default=Path("results/families.json"))
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--llama-cpp", type=Path, default=os.environ.get("LLAMA_CPP"), help="llama.cpp's source")
    parser.add_argument("--llama-bin", type=Path, default=os.environ.get("LLAMA_CPP_BIN"), help="its built programs")
    parser.add_argument("--record", action="store_true", help="write recorded.json and docs/models.md")
    given = parser.parse_args()
    source = given.llama_cpp and LlamaCpp(Path(given.llama_cpp), given.llama_bin and Path(given.llama_bin))
    rows = [row for row in ROWS if not given.family or row.family in given.family]
    results, kept = matrix(rows, source, given.jobs)
    for each in (Result(*COLUMNS[:7], COLUMNS[7]), *results):  # type: ignore[arg-type]
        print(line(replace(each, said=each.said[:150])))
    given.json.parent.mkdir(parents=True, exist_ok=True)
    given.json.write_text(json.dumps([asdict(each) for each in results], indent=1) + "\n")
    if given.record:
        if not source or given.family:
            parser.error("--record needs --llama-cpp, and every family")
        needed = [asdict(each) for each in results if page.needs_llama(each)]
        lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(each)}" for name, each in kept.items())
        more = ",\n".join(map(json.dumps, needed))
        text = f'{{"how": {json.dumps(HOW)},\n"files": {{\n{lines}\n}},\n"results": [\n{more}\n]}}\n'
        gguf_files.RECORDED.write_text(text, encoding="utf-8")
        page.PAGE.write_text(page.text(results), encoding="utf-8")
    failed = [each for each in results if each.failed]
    print(f"\n{len(results)} rows: {dict(Counter(each.verdict for each in results))}; {given.json}")
    for each in failed:
        print(f"FAILED {each.family}, {each.variant}, {each.file} {each.formats}: {each.said}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
