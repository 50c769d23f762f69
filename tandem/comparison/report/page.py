"""Renders report.html: one self-contained file without scripts. Imports jinja2 on use."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tandem.comparison.analysis import words
from tandem.comparison.analysis.comparison import Comparison
from tandem.comparison.measuring.attempt import tried
from tandem.comparison.report import answers, plots, sentences, tables
from tandem.comparison.report.plots import Picture
from tandem.comparison.report.serving import deployment
from tandem.comparison.report.tables import Table
from tandem.installing import install_command


@dataclass(frozen=True, slots=True)
class Section:
    title: str
    lines: tuple[str, ...] = ()
    tables: tuple[Table, ...] = ()
    pictures: tuple[Picture, ...] = ()
    prompts: tuple[answers.Prompt, ...] = ()
    folded: bool = False  # shown on a click

    @property
    def empty(self) -> bool:
        return not (self.lines or self.tables or self.pictures or self.prompts)


def html(found: Comparison) -> str:
    """Renders the page. SVG is trusted; all other text is escaped."""
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
    partial_run, decision = sentences.partial(found), found.decision
    models = words.joined(sentences.models(found, "model_name") or ["a model"])
    sections = tuple(section for section in _sections(found, remarks) if not section.empty)
    chosen = dict.fromkeys(verdict.architecture for verdict in found.decisions if verdict.decided)
    commands = (tried(remarks, "The command", partial(deployment, found, name), None) for name in chosen)
    return dict(
        title=f"Where should the draft of {models} run?" + (" (rehearsed)" if found.rehearsed else ""),
        stamp=f"{sentences.date(found)}. {words.capitalised(sentences.setting(found))}.",
        cautions=(*([f"This run is partial: {partial_run}."] if partial_run else []), *found.caveats),
        decision=decision,
        undecided=sentences.undecided(found),
        ratios=tuple(map(words.capitalised, sentences.ratios(decision) if decision and decision.decided else ())),
        speed=tried(remarks, "The picture of speed", lambda: plots.speed(found), None),
        others=tuple(verdict for verdict in found.decisions if verdict is not decision),
        missing=tuple(sentences.not_measured(found)),
        commands=tuple(each for each in commands if each),
        card=sentences.card(found),
        sections=(*sections, Section("What could not be shown", tuple(remarks))) if remarks else sections,
        no_plots=f"Pictures need matplotlib ({install_command('comparison')}).",
    )


Make = Callable[[Comparison], Any]


def _sections(found: Comparison, remarks: list[str]) -> list[Section]:
    def made(*makes: Make) -> tuple[Any, ...]:
        each = (tried(remarks, f"{make.__name__}", partial(make, found), None) for make in makes)
        return tuple(one for one in each if one is not None)

    failed = [f"{words.plural(len(found.failed), 'request')} failed."] if found.failed else []
    wrong = [sentences.identity(found), *failed, *(f"Remark: {remark}" for remark in found.remarks)]
    return [
        Section(
            "What was measured",
            tables=made(_architectures, tables.link_table),
            pictures=made(plots.by_round_trip, plots.by_cause),
        ),
        Section("Under load", tables=made(tables.capacity_table, tables.load_table), pictures=made(plots.under_load)),
        Section("Identity, failures, remarks", tuple(wrong)),
        Section("What differs or failed", tables=made(tables.divergence_table, tables.failure_table), folded=True),
        Section("What they answered", prompts=tuple(answers.answers(found)), folded=True),
        Section("Causes and workloads", tables=made(tables.cause_table, tables.workload_table), folded=True),
        Section("Drafts", tuple(map(words.capitalised, sentences.drafts(found))), folded=True),
        Section(
            "Theory beside measurement",
            tuple(sentences.theory(found)),
            made(tables.prediction_table, tables.cost_table),
            folded=True,
        ),
        Section("Other links", tables=(*_others(found), *made(tables.emulation_table)), folded=True),
        Section("Sampling", tables=made(tables.sampling_table), folded=True),
        Section("How it was run", tables=made(_settings, _versions, _servers, _prompts), folded=True),
    ]


def _architectures(found: Comparison) -> Table:
    return tables.architecture_table(found, found.base)


def _others(found: Comparison) -> list[Table]:
    return [tables.architecture_table(found, m) for m in found.links if m is not found.base]


def _settings(found: Comparison) -> Table:
    values = {f.name: getattr(found.config, f.name) for f in dataclasses.fields(found.config)}
    shown = {key: value for key, value in values.items() if key not in ("prompts", "credentials")}
    return _pairs("Settings", [(key.replace("_", " "), words.setting(value)) for key, value in shown.items()])


def _versions(found: Comparison) -> Table:
    own = {"Python": found.machine.python, "commit": found.machine.git_commit or words.MISSING}
    return _pairs("Versions", list({**own, **found.machine.packages}.items()))


def _servers(found: Comparison) -> Table:
    rows = [
        (
            words.name(e.architecture.name),
            f"{e.architecture.service} at {e.address}",
            "ran already" if e.log is None else "started for this comparison",
            f"{e.model.model_name}, {e.model.dtype} on {e.model.device}, {e.model.backend}, {e.model.kv_slots} slots",
            e.model.draft_name or words.MISSING,
        )
        for e in found.endpoints
    ]
    return tables.table("Servers", ["architecture", "service", "started", "model", "draft"], rows, texts=5)


def _prompts(found: Comparison) -> Table:
    rows = [(prompt.name, "yes" if prompt.chat else "no", prompt.text) for prompt in found.config.prompts]
    return tables.table("Prompts", ["prompt", "chat template", "text"], rows, texts=3)


def _pairs(caption: str, rows: Sequence[tuple[str, str]]) -> Table:
    return tables.table(caption, ["what", "value"], rows, texts=2)


def _unbroken(value: Any) -> Any:
    """Puts no-break spaces between figures and units."""
    return re.sub(r"(?<=\d) (?=(?:%|ms|s|GiB)(?!\w))", "\N{NO-BREAK SPACE}", value) if type(value) is str else value
