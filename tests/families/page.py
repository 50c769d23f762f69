"""Writes docs/models.md from the matrix's results and the product's table of families."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tandem.checkpoints.family_configs import table
from tests.families.checks import Result

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
TEMPLATE = Path(__file__).with_name("page.txt")
TEXT = Path(__file__).parents[1] / "checkpoints" / "llama_text.json"
NEED_LLAMA = ("converter's GGUF", "llama-quantize", "vocabulary")


def needs_llama(result: Result) -> bool:
    return result.file in NEED_LLAMA


def text(results: Sequence[Result]) -> str:
    """The page."""
    models = [each for each in results if each.family != "tokenizer"]
    vocabularies = {each.variant: each for each in results if each.family == "tokenizer"}
    served = list(dict.fromkeys(each.family for each in models if _folder(each) and each.verdict != "refused"))
    partly = [each for each in models if each.verdict == "refused" and each.family in served and not needs_llama(each)]
    equal, near = (
        dict.fromkeys(each.formats for each in models if not _folder(each) and each.verdict == verdict)
        for verdict in ("equal", "near")
    )
    recorded = json.loads(TEXT.read_text(encoding="utf-8"))
    return TEMPLATE.read_text(encoding="utf-8").format(
        families=_families(served, models),
        refused="".join(f"| {why} | {', '.join(names)} |\n" for why, names in table()["refused"].items()),
        partly=_partly(partly),
        equal=", ".join(equal),
        near=f"; nearly, with activations in 8 bits beside blocks: {', '.join(near)}" if near else "",
        texts=len(recorded["texts"]),
        kinds=len(recorded["digests"]),
        vocabularies=", ".join(name for name, each in vocabularies.items() if each.verdict == "equal"),
        refused_vocabularies=", ".join(name for name, each in vocabularies.items() if each.verdict == "refused"),
        rows=sum(not needs_llama(each) for each in results),
        further=sum(map(needs_llama, results)),
    )


def _folder(result: Result) -> bool:
    return result.file.endswith("folder")


def _families(served: Sequence[str], models: Sequence[Result]) -> str:
    """Rows of the table: families of which all cells are equal share one."""
    rows: dict[str, list[str]] = {}
    for name in served:
        rows.setdefault(_cells([each for each in models if each.family == name]), []).append(name)
    return "".join(f"| {', '.join(names)} | {cells} |\n" for cells, names in rows.items())


def _cells(results: Sequence[Result]) -> str:
    folders = [each for each in results if _folder(each) and each.verdict != "refused"]
    usual = "native" if any(each.runs == "native" for each in folders) else "module code"
    others = dict.fromkeys(each.variant for each in folders if each.runs != usual)
    runs = usual + (f" (module code: {', '.join(others)})" if others else "")
    variants = ", ".join(dict.fromkeys(each.variant for each in folders))
    files = [each for each in results if not _folder(each)]
    gguf = "yes" if any(each.verdict != "refused" for each in files) else "refused" if files else ""
    exact = "yes" if all(each.exact for each in folders) else "no"
    return f"{runs} | {variants} | {exact} | {gguf}"


def _partly(results: Sequence[Result]) -> str:
    """What is refused of families that run otherwise; a refusal begins with the file that the matrix made."""
    lines = dict.fromkeys(f"- {each.family}, {each.variant}: `{each.said.partition(': ')[2]}`\n" for each in results)
    return f"\nRefused of families that run otherwise:\n\n{''.join(lines)}" if lines else ""
