"""Builds a report, independent of its format: the decision, its evidence, and all details.

SECTIONS says what is shown on pages (HTML and Markdown), on terminals, or on both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone

from tandem.comparison.measuring.attempt import tried
from tandem.comparison.report import formatting as fmt
from tandem.comparison.report import reading, statements, tables, theory_tables
from tandem.comparison.report.blocks import (
    Block,
    Details,
    Outputs,
    Plot,
    Report,
    Section,
    Table,
    Text,
    bullets,
    paragraph,
    table,
    words,
)
from tandem.comparison.report.capacity_table import capacity_table, capacity_text
from tandem.comparison.report.figures import FIGURES
from tandem.comparison.report.history import history_table
from tandem.comparison.report.load_tables import load_decisions, load_table
from tandem.comparison.report.machine import card, cautions
from tandem.comparison.report.outputs import answers
from tandem.comparison.report.reading import JSON, SCHEMA_VERSION
from tandem.comparison.report.rehearsed import LABEL, is_rehearsed, labelled
from tandem.comparison.report.top import top_of

PAGE, TERMINAL, BOTH = "page", "terminal", "page and terminal"
MOST_ROWS = 30
"""The number of rows that a terminal shows of a table that pages fold; comparison.json has all."""
LONGEST_TEXT = 4000
"""The number of characters of a prompt that are shown; comparison.json has all."""


def report_of(comparison: JSON, plots: Mapping[str, Plot] | None = None, before: Sequence[JSON] = ()) -> Report:
    """Builds the report. `plots`: by name, if some could not be drawn. `before`: earlier runs, of the index of runs.

    Raises ValueError for another version's file.
    """
    version = comparison.get("schema_version")
    if version != SCHEMA_VERSION:
        raise ValueError(f"comparison.json has schema_version {version}; this renders {SCHEMA_VERSION}")
    plots = {figure.name: figure.block(comparison) for figure in FIGURES} if plots is None else plots
    top, models = top_of(comparison), reading.model_values(comparison, "model_name")
    of = f" of {fmt.joined(models)}" if models else ""
    return Report(
        title=f"{'Partial: where' if comparison.get('partial') else 'Where'} should the draft{of} run?"
        + (f" ({LABEL})" if is_rehearsed(comparison) else ""),
        date=_date(comparison),
        setting=fmt.capitalised(f"{statements.run_setting(comparison)}."),
        cautions=cautions(comparison),
        headline=top.headline,
        sureness=top.sureness,
        doubt=top.doubt,
        ratios=top.ratios,
        measure="Speed over plain decoding and its 95 % interval, both measured"
        f" {fmt.link_phrase(reading.base(comparison)['link'])}.",
        verdicts=top.verdicts,
        commands=top.commands,
        card=card(comparison),
        reasons=top.reasons,
        sections=tuple(labelled(comparison, list(_sections(comparison, plots, before)))),
    )


def _sections(comparison: JSON, plots: Mapping[str, Plot], before: Sequence[JSON]) -> Iterator[Section]:
    """Yields the sections that have something to show; the last one says what was left out."""
    absent: list[str] = []
    for anchor, title, parts in SECTIONS:
        blocks = [block for part in parts for block in _on_page(part, comparison, plots)]
        undrawn = [block for block in blocks if isinstance(block, Plot) and not (block.drawn or block.failed)]
        absent += [f"{plot.title}. {plot.finding}" for plot in undrawn]
        if anchor == "history":
            blocks += [found] if (found := history_table(before)) else []
        if anchor == "setup":
            absent += statements.unmeasured(comparison)
            blocks += [Details(f"Not in this report ({len(absent)})", (bullets("", absent),))] if absent else []
        if shown := tuple(block for block in blocks if block not in undrawn):
            yield Section(anchor, title, shown)


def terminal_blocks(comparison: JSON) -> Iterator[Table | Text]:
    """Yields what is shown on a terminal below the decision."""
    for part in (part for _, _, parts in SECTIONS for part in parts if not isinstance(part, str)):
        for block in labelled(comparison, _made(*part[1:], comparison)) if TERMINAL in part[0] else ():
            if isinstance(block, Details):
                yield paragraph(f"{block.summary}:", "warning")
                yield from _first_rows(block)
            elif not isinstance(block, Plot | Outputs):
                yield block.on_terminal() if isinstance(block, Table) else block


def _first_rows(details: Details) -> Iterator[Table | Text]:
    for block in details.blocks:
        if isinstance(block, Table):
            yield replace(block, rows=block.rows[:MOST_ROWS]).on_terminal()
            if (more := len(block.rows) - MOST_ROWS) > 0:
                yield paragraph(f"and {more} more, in comparison.json", "warning")


def _on_page(part: Part, comparison: JSON, plots: Mapping[str, Plot]) -> list[Block]:
    if isinstance(part, str):
        return [plots[part]]
    made = _made(*part[1:], comparison) if PAGE in part[0] else ()
    return [block.on_page() if isinstance(block, Table) else block for block in made]


def _made(what: str, make: Callable[[JSON], Made], comparison: JSON) -> Sequence[Block]:
    """Makes a part of a section; one that fails becomes a remark."""
    remarks: list[str] = []
    made = tried(remarks, what, lambda: make(comparison), None)
    blocks = list(made or ()) if isinstance(made, Sequence | None) else [made]
    return [*blocks, *(paragraph(f"Remark: {remark}", "warning") for remark in remarks)]


def _date(comparison: JSON) -> str:
    try:
        at = datetime.fromisoformat(comparison["started_at"]).astimezone(timezone.utc)
    except ValueError:
        return str(comparison["started_at"])
    return f"{at.day} {at:%B %Y, %H:%M} UTC"


def _setup(comparison: JSON) -> list[Block]:
    settings, machine, versions = dict(comparison["settings"]), dict(comparison["machine"]), comparison["versions"]
    prompts, memory = settings.pop("prompts", None) or [], machine.pop("memory_bytes", None)
    if "speculation_length" in settings:
        settings["speculation_length"] = fmt.length(settings["speculation_length"])
    machine["memory"] = f"{memory / 2**30:.0f} GiB" if memory else None
    own = {key: value for key, value in versions.items() if key != "packages"}
    pairs = {"Settings": settings, "Machine": machine, "Versions": {**own, **(versions.get("packages") or {})}}
    return [
        *(Details(what, (_pairs(what, values),)) for what, values in pairs.items()),
        Details("Servers", tuple(_server(name, of) for name, of in comparison["servers"].items())),
        Details(f"Prompts ({len(prompts)})", tuple(_prompt(prompt) for prompt in prompts)),
    ]


def _server(name: str, server: JSON) -> Table:
    here = "started for this comparison" if server["started_here"] else "ran already"
    return _pairs(f"{fmt.name(name)}: {server['service']} at {server['address']}, {here}", server["model"])


def _prompt(prompt: JSON) -> Text:
    text = str(prompt.get("text", ""))
    left = len(text) - LONGEST_TEXT
    shown = text if left <= 0 else f"{text[:LONGEST_TEXT]}… ({left} characters more in comparison.json)"
    how = ", in the chat template" if prompt.get("chat") else ""
    name = f"{prompt.get('name', 'prompt')} ({fmt.name(str(prompt.get('kind', '')))}{how})"
    return Text("listing", (shown,), name)


def _pairs(caption: str, values: JSON) -> Table:
    rows = [[key.replace("_", " "), fmt.format_value(value)] for key, value in values.items()]
    return table(caption, words("what", "value"), rows)


Made = Sequence[Block] | Block | None
Part = str | tuple[str, str, Callable[[JSON], Made]]
"""The name of a plot, or where a part is shown, what a remark calls it if it cannot be made, and what makes it."""


SECTIONS: tuple[tuple[str, str, tuple[Part, ...]], ...] = (
    ("found", "What was found, and how sure it is", ((PAGE, "The statements", statements.found),)),
    ("architectures", "What was measured", (
        (BOTH, "The table of architectures", tables.architecture_table),
        (TERMINAL, "The tables of other conditions", tables.other_tables),
        (PAGE, "The table of round trips", tables.round_trip_table),
        "tpot-by-rtt",
        "tpot-by-link",
        "time-by-cause",
        (BOTH, "The table of causes", tables.cause_table),
        "speedup-by-workload",
        (BOTH, "The table of workloads", tables.workload_table),
        "acceptance-by-position",
        "tokens-over-time",
    )),
    ("outputs", "What they answered", ((PAGE, "The answers", answers),)),
    ("load", "Under load", (
        (BOTH, "The capacity", capacity_text),
        (BOTH, "The table of capacity", capacity_table),
        (BOTH, "The decisions under load", load_decisions),
        (BOTH, "The table under load", load_table),
        "latency-by-throughput",
    )),
    ("theory", "Theory beside measurement", (
        (PAGE, "What follows from theory", theory_tables.derived),
        (BOTH, "The table of predictions", theory_tables.prediction_table),
        (PAGE, "Theory beside measurement", theory_tables.basis),
        "tpot-by-length",
    )),
    ("sampling", "Sampling", (
        (PAGE, "The table of samplings", tables.sampling_table),
        "acceptance-by-temperature",
    )),
    ("links", "The link", (
        (PAGE, "The link", lambda comparison: paragraph(f"The client reaches the servers: {comparison['link']}.")),
        (PAGE, "The table of links", tables.link_table),
        (TERMINAL, "The table of links", tables.emulated_links),
    )),
    ("identity", "Identity, failures, remarks", (
        (TERMINAL, "The setting", statements.basis),
        (TERMINAL, "The drafts", statements.drafts),
        (TERMINAL, "The rounds", statements.rounds),
        (BOTH, "The outputs that differ", statements.divergences),
        (BOTH, "The failures", statements.failures),
        (BOTH, "The remarks", statements.remarks),
    )),
    ("history", "Earlier runs", ()),
    ("setup", "How it was run", ((PAGE, "How it was run", _setup),)),
)  # fmt: skip
