"""Renders report.html: one self-contained file without scripts. Imports jinja2 on use."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tandem.comparison.analysis import words
from tandem.comparison.analysis.comparison import Comparison
from tandem.comparison.measuring.attempt import tried
from tandem.comparison.measuring.config import ComparisonConfig
from tandem.comparison.measuring.json_form import encoded
from tandem.comparison.report import plots, sentences, serving, tables
from tandem.comparison.report.plots import Picture
from tandem.comparison.report.tables import Table

REASONS = 3  # on the first screen


@dataclass(frozen=True, slots=True)
class Section:
    title: str
    lines: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()
    pictures: tuple[Picture, ...] = ()
    tables: tuple[Table, ...] = ()

    @property
    def empty(self) -> bool:
        return not (self.lines or self.commands or self.pictures or self.tables)


def html(found: Comparison) -> str:
    """Renders the page. Pictures are trusted; all other text is escaped."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_unbroken,
    )
    return environment.get_template("page.html.jinja").render(page=page_of(found))


def page_of(found: Comparison) -> dict[str, Any]:
    """Returns the template's variables; a failing part becomes a remark."""
    remarks: list[str] = []
    decision = found.decision
    partial_run = sentences.partial(found)
    models = words.joined(sentences.models(found, "model_name") or ["a model"])
    reasons = tuple(map(words.capitalised, sentences.ratios(decision) if decision and decision.decided else ()))
    chosen = dict.fromkeys(
        verdict.architecture for verdict in found.decisions if verdict.decided and not found.rehearsed
    )
    commands = (tried(remarks, "The command", partial(command, found, name), None) for name in chosen)
    made = [each for each in commands if each and each.commands]
    shown, folded = _shown(found, remarks), _folded(found, remarks)
    return dict(
        title=f"Where should the draft of {models} run?" + (" (rehearsed)" if found.rehearsed else ""),
        stamp=f"{found.started_at[:16].replace('T', ' ')} UTC. {words.capitalised(sentences.setting(found))}.",
        cautions=(*([f"This run is partial: {partial_run}."] if partial_run else []), *found.caveats),
        decision=decision,
        sure=sentences.reasons(decision) if decision else "",
        undecided=sentences.undecided(found),
        speed=tried(remarks, "The picture of speed", lambda: plots.speed(found), None),
        reasons=reasons[:REASONS],
        command=made[0] if made else None,
        others=tuple(verdict for verdict in found.decisions if verdict is not decision),
        missing=tuple(sentences.not_measured(found)),
        card=sentences.card(found),
        shown=_full((*shown, Section("What could not be shown", tuple(remarks)))),
        folded=_full((Section("More ratios", reasons[REASONS:]), *made[1:], *folded)),
    )


def command(found: Comparison, architecture: str) -> Section:
    lines = tuple(serving.served(found, architecture))
    title = f"Serve {words.name_in_sentence(architecture)} as measured, to OpenAI clients at {serving.URL}"
    return Section(title, (serving.APART,) if len(lines) > 1 else (), lines)


def _full(sections: Iterable[Section]) -> tuple[Section, ...]:
    return tuple(section for section in sections if not section.empty)


Make = Callable[[Comparison], Any]


def _made(found: Comparison, remarks: list[str], *makes: Make) -> tuple[Any, ...]:
    each = (tried(remarks, f"{make.__name__}", partial(make, found), None) for make in makes)
    return tuple(one for one in each if one is not None)


def _shown(found: Comparison, remarks: list[str]) -> list[Section]:
    made = partial(_made, found, remarks)
    failed = [f"{words.plural(len(found.failed), 'request')} failed."] if found.failed else []
    wrong = [sentences.identity(found), *failed, *(f"Remark: {remark}" for remark in found.remarks)]
    pictures, loads = made(plots.by_round_trip, plots.by_cause), made(plots.under_load)
    return [
        Section("What was measured", pictures=pictures, tables=made(_architectures)),
        Section("Under load", pictures=loads, tables=made(tables.capacity_table)),
        Section("Identity, failures, remarks", tuple(wrong)),
    ]


def _folded(found: Comparison, remarks: list[str]) -> list[Section]:
    made = partial(_made, found, remarks)
    links = (tables.architecture_table(found, m) for m in found.links if m is not found.base)
    return [
        Section("What differs or failed", tables=made(tables.divergence_table, tables.failure_table)),
        Section("What they answered", tables=made(tables.answer_table)),
        Section("Causes and workloads", tables=made(tables.cause_table, tables.workload_table)),
        Section("Drafts", tuple(map(words.capitalised, sentences.drafts(found)))),
        Section("Other links", tables=(*made(tables.link_table), *links, *made(tables.emulation_table))),
        Section("Sampling", tables=made(tables.sampling_table)),
        Section("Loads", tables=made(tables.load_table)),
        Section("How it was run", tuple(_settings(found))),
    ]


def _architectures(found: Comparison) -> Table:
    return tables.architecture_table(found, found.base)


def _settings(found: Comparison) -> Iterable[str]:
    """Yields the settings that are not the defaults, and the packages."""
    for field in dataclasses.fields(ComparisonConfig):
        value = getattr(found.config, field.name)
        if field.name not in ("prompts", "credentials") and value != field.default:
            yield f"{field.name.replace('_', ' ').capitalize()}: {encoded(value)}."
    packages = (f"{package} {version}" for package, version in found.machine.packages.items())
    yield f"Packages: {', '.join(packages)}."


def _unbroken(value: Any) -> Any:
    """Puts no-break spaces between figures and units."""
    return re.sub(r"(?<=\d) (?=(?:%|ms|s|GiB)(?!\w))", "\N{NO-BREAK SPACE}", value) if type(value) is str else value
