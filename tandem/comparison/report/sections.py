"""Builds a report, independent of its format: the decision, its evidence, and all details."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from itertools import chain
from typing import Any

from tandem.comparison.report import formatting as fmt
from tandem.comparison.report import reading
from tandem.comparison.report.attempt import Attempts
from tandem.comparison.report.blocks import (
    Block,
    Column,
    DecisionBlock,
    Details,
    Listing,
    Paragraph,
    Report,
    Section,
    Table,
    table,
)
from tandem.comparison.report.figures import FIGURES
from tandem.comparison.report.load_tables import load_blocks
from tandem.comparison.report.reading import JSON
from tandem.comparison.report.tables import (
    architecture_table,
    cause_table,
    link_table,
    round_trip_table,
    sampling_table,
    workload_table,
)
from tandem.comparison.report.theory_tables import theory_blocks

LONGEST_TEXT = 4000
"""The number of characters of a prompt that are shown; comparison.json has all."""


def report_of(comparison: JSON) -> Report:
    """Builds the report. Raises ValueError for a file of another version."""
    version = comparison.get("schema_version")
    if version != 2:
        raise ValueError(f"comparison.json has schema_version {version}; this renders 2")
    plots = {figure.name: figure.block(comparison) for figure in FIGURES}

    def table_of(make: Callable[[JSON], Table | None]) -> list[Block]:
        found = make(comparison)
        return [] if found is None else [found]

    def tried(what: str, make: Callable[[], Sequence[Block]]) -> Sequence[Block]:
        attempts = Attempts()
        none: Sequence[Block] = ()
        blocks = attempts.of(what, make, none)
        return [*blocks, *(Paragraph(f"Remark: {remark}") for remark in attempts.remarks)]

    parts: list[tuple[str, str, list[Sequence[Block]]]] = [
        ("architectures", "What was measured", [
            tried("The table of architectures", lambda: table_of(architecture_table)),
            tried("The table of round trips", lambda: table_of(round_trip_table)),
            [plots["tpot-by-rtt"], plots["time-by-cause"]],
            tried("The table of causes", lambda: table_of(cause_table)),
            [plots["speedup-by-workload"]],
            tried("The table of workloads", lambda: table_of(workload_table)),
            [plots["acceptance-by-position"], plots["tokens-over-time"]],
        ]),
        ("load", "Under load", [
            tried("The figures under load", lambda: load_blocks(comparison)), [plots["latency-by-throughput"]]
        ]),
        ("theory", "Theory beside measurement", [
            tried("Theory beside measurement", lambda: theory_blocks(comparison)), [plots["tpot-by-length"]]
        ]),
        ("sampling", "Sampling", [
            tried("The table of samplings", lambda: table_of(sampling_table)), [plots["acceptance-by-temperature"]]
        ]),
        ("links", "The link", [
            [Paragraph(f"The client reaches the servers: {comparison['link']}.")],
            tried("The table of links", lambda: table_of(link_table)),
        ]),
        ("identity", "Identity, failures, remarks", [tried("Failures and remarks", lambda: _troubles(comparison))]),
        ("setup", "How it was run", [tried("How it was run", lambda: _setup(comparison))]),
    ]  # fmt: skip
    sections = (Section(anchor, title, tuple(chain.from_iterable(blocks))) for anchor, title, blocks in parts)
    return Report(_title(comparison), _date(comparison), _setting(comparison), _decision(comparison), tuple(sections))


def _title(comparison: JSON) -> str:
    models = dict.fromkeys(str(s["model"]["model_name"]) for s in comparison["servers"].values() if _names(s))
    of = f" of {fmt.joined(list(models))}" if models else ""
    return f"{'Partial: where' if comparison.get('partial') else 'Where'} should the draft{of} run?"


def _names(server: JSON) -> bool:
    return bool(server["model"].get("model_name"))


def _date(comparison: JSON) -> str:
    try:
        at = datetime.fromisoformat(comparison["started_at"]).astimezone(timezone.utc)
    except ValueError:
        return str(comparison["started_at"])
    return f"{at.day} {at:%B %Y, %H:%M} UTC"


def _setting(comparison: JSON) -> str:
    """Describes the setting in one line: draft, dtype, device, length, sampling, prompts, machine."""
    models = [server["model"] for server in comparison["servers"].values()]
    settings, base = comparison["settings"], reading.base(comparison)

    def each(key: str) -> str:
        return ", ".join(dict.fromkeys(str(model[key]) for model in models if model.get(key)))

    parts = [
        f"draft {each('draft_name')}" if each("draft_name") else "",
        f"{each('dtype')} on {each('device')}" if each("dtype") and each("device") else "",
        f"speculation length {fmt.length(settings['speculation_length'])}" if "speculation_length" in settings else "",
        fmt.sampling(base["sampling"]),
        fmt.plural(len(settings["prompts"]), "prompt") if settings.get("prompts") else "",
        f"at most {settings['max_new_tokens']} tokens each" if settings.get("max_new_tokens") else "",
        f"link: {comparison['link']}",
        _machine(comparison["machine"]),
    ]
    line = "; ".join(part for part in parts if part)
    return f"{_part(comparison)}{line[:1].upper()}{line[1:]}."


def _part(comparison: JSON) -> str:
    """Says why the comparison is incomplete, and how much of it was measured."""
    partial = comparison.get("partial")
    if not partial:
        return ""
    of = f"{partial['measured']} of {partial['planned'] or 'an unknown number of'} requests"
    return f"Partial: {of} were measured ({partial['reason']}). "


def _machine(machine: JSON) -> str:
    cores = f"{machine['usable_cores']} cores" if machine.get("usable_cores") else ""
    return ", ".join(str(part) for part in (machine.get("processor"), cores) if part)


def _decision(comparison: JSON) -> DecisionBlock:
    decision = comparison["decision"]
    if decision is None:
        return DecisionBlock(_why_undecided(comparison))
    spread = fmt.span(decision["speedup_interval"])
    sure = f"95 % interval {spread}, measured" if spread != fmt.MISSING else "measured, no interval"
    length = decision["speculation_length"]
    figures = [
        (fmt.name(decision["architecture"]), "architecture"),
        (fmt.length(length) if length != 0 else "none", "speculation length"),
        (fmt.times(decision["speedup"]), f"speedup over plain decoding; {sure}"),
    ]
    loaded = comparison.get("under_load")
    because = [*decision["because"], *([loaded["headline"]] if loaded and loaded["headline"] else [])]
    return DecisionBlock(decision["headline"], tuple(figures), tuple(because), tuple(decision["would_change"]))


def _why_undecided(comparison: JSON) -> str:
    base = reading.base(comparison)
    measured = [name for name in base["architectures"] if reading.mean_tpot(base, name) is not None]
    if not measured:
        return "No decision: no request completed with two tokens or more."
    if len(measured) == 1:
        return f"No decision: only {fmt.name_in_sentence(measured[0])} was measured."
    if reading.baseline(comparison) is None:
        return "No decision: plain decoding did not run, so speculation has no baseline."
    return "No decision: this comparison.json contains none; its figures are below."


def _troubles(comparison: JSON) -> list[Block]:
    blocks: list[Block] = [_divergences(comparison)]
    failed = [
        [fmt.name(name), "", "warm-up", failure["code"], failure["message"]]
        for name, failure in comparison["warm_up_failures"].items()
    ] + [
        [fmt.name(r["architecture"]), r["condition"], f"{r['prompt']}, run {r['run']}", r["error"]["code"],
         r["error"]["message"]]
        for r in reading.failures(comparison)
    ]  # fmt: skip
    if failed:
        heads = ("architecture", "condition", "request", "code", "message")
        shown = table("Failures", [Column(head, False) for head in heads], failed)
        blocks.append(shown if len(failed) <= 10 else Details(f"All {len(failed)} failures", (shown,)))
    else:
        blocks.append(Paragraph("No request failed."))
    blocks += [Paragraph(f"Remark: {remark}") for remark in comparison["remarks"]]
    return blocks


def _divergences(comparison: JSON) -> Block:
    claims = [
        (condition["name"], name, of["identical_to_autoregressive"])
        for condition in comparison["conditions"]
        for name, of in condition["architectures"].items()
        if of["identical_to_autoregressive"] and (name != reading.AUTOREGRESSIVE or condition["varies"] == "load")
    ]
    total = sum(claim["total"] for _, _, claim in claims)
    if not total:
        return Paragraph("Outputs were not compared with plain decoding: it did not run, or no identity is claimed.")
    rows = [
        [fmt.name(name), condition, f"{d['prompt']}, run {d['run']}", str(d["position"]), _id(d["token"]),
         _id(d["autoregressive_token"]), fmt.number(d["logit_gap"], 4)]
        for condition, name, claim in claims
        for d in claim["divergences"]
    ]  # fmt: skip
    if not rows:
        return Paragraph(f"Every output was token-identical to plain decoding ({total} of {total}).")
    numeric = ("position", "token", "plain decoding's token", "logit gap")
    listed = table(
        "Outputs that differ from plain decoding",
        [Column("architecture", False), Column("condition", False), Column("request", False), *map(Column, numeric)],
        rows,
        "Position: of the first token that differs. Logit gap: between the two tokens that the target put first.",
    )
    same = sum(claim["count"] for _, _, claim in claims)
    return Details(f"Token-identical to plain decoding: {same} of {total} outputs. {len(rows)} differ", (listed,))


def _id(token: int | None) -> str:
    return "ended" if token is None else str(token)


def _setup(comparison: JSON) -> list[Block]:
    settings = {key: value for key, value in comparison["settings"].items() if key != "prompts"}
    prompts = comparison["settings"].get("prompts") or []
    return [
        Details("Settings", (_pairs("Settings", settings),)),
        Details("Machine", (_pairs("Machine", _readable(comparison["machine"])),)),
        Details("Versions", (_pairs("Versions", _flat(comparison["versions"])),)),
        Details("Servers", tuple(_server(name, of) for name, of in comparison["servers"].items())),
        Details(f"Prompts ({len(prompts)})", tuple(_prompt(prompt) for prompt in prompts)),
    ]


def _server(name: str, server: JSON) -> Table:
    here = "started for this comparison" if server["started_here"] else "ran already"
    return _pairs(f"{fmt.name(name)}: {server['service']} at {server['address']}, {here}", server["model"])


def _prompt(prompt: JSON) -> Listing:
    text = str(prompt.get("text", ""))
    left = len(text) - LONGEST_TEXT
    shown = text if left <= 0 else f"{text[:LONGEST_TEXT]}… ({left} characters more in comparison.json)"
    how = ", in the chat template" if prompt.get("chat") else ""
    return Listing(f"{prompt.get('name', 'prompt')} ({fmt.name(str(prompt.get('kind', '')))}{how})", shown)


def _pairs(caption: str, values: JSON) -> Table:
    rows = [[key.replace("_", " "), fmt.format_value(value)] for key, value in values.items()]
    return table(caption, [Column("what", False), Column("value", False)], rows)


def _flat(versions: JSON) -> dict[str, Any]:
    packages = versions.get("packages") or {}
    return {**{k: v for k, v in versions.items() if k != "packages"}, **packages}


def _readable(machine: JSON) -> dict[str, Any]:
    memory = machine.get("memory_bytes")
    rest = {key: value for key, value in machine.items() if key != "memory_bytes"}
    return {**rest, "memory": f"{memory / 2**30:.0f} GiB" if memory else None}
