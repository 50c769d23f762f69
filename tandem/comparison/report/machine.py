"""Builds the card of the machine, and the cautions that stand above a decision."""

from __future__ import annotations

import statistics

from tandem.comparison.report import formatting as fmt
from tandem.comparison.report import reading
from tandem.comparison.report.reading import JSON

LEAST_SHARE = 0.005
"""The least share of the processor time that is worth a word."""
SHOWN_PACKAGES = ("torch", "transformers", "numpy")


def card(comparison: JSON) -> tuple[tuple[str, str], ...]:
    """Returns what figures depend on, as (what, value)."""
    machine, versions = comparison["machine"], comparison["versions"]
    memory = f", {machine['memory_bytes'] / 2**30:.0f} GiB" if machine["memory_bytes"] else ""
    packages = versions.get("packages") or {}
    own = [f"Tandem {versions['git_commit']}"] if versions.get("git_commit") else []
    own += [f"Python {versions['python']}"]
    own += [f"{name} {packages[name]}" for name in SHOWN_PACKAGES if name in packages]
    drafts = reading.model_values(comparison, "draft_name")
    cards = {
        "Machine": f"{machine['processor']}, {machine['architecture']}",
        "Cores, memory": f"{fmt.plural(machine['usable_cores'], 'core')}{memory}",
        "Load meanwhile": _load(comparison),
        "System": machine["system"],
        "Software": ", ".join(own),
        "Target": fmt.joined(reading.model_values(comparison, "model_name") or ["unknown"]),
        "Draft": fmt.joined(list(dict.fromkeys(name.removeprefix("remote:") for name in drafts)) or ["none"]),
        "Weights": _weights(comparison),
        "Link": _link(comparison),
        "Servers": _servers(comparison),
    }
    return tuple((what, value) for what, value in cards.items() if value)


def _load(comparison: JSON) -> str:
    """Says what other programs took while requests were measured; "" if that is not known."""
    loads = [load for record in comparison["records"] if (load := record.get("machine_load"))]
    said = []
    for key, what in (("others", "other programs had {} of its time"), ("steal", "the host took {}")):
        known = [load[key] for load in loads if load[key] is not None]
        if known and (share := statistics.fmean(known)) >= LEAST_SHARE:
            said.append(what.format(fmt.percent(share)))
    if known := [load["load_average"] for load in loads if load["load_average"] is not None]:
        said.append(f"load average {statistics.fmean(known):.1f}, our servers included")
    return ", ".join(said)


def _weights(comparison: JSON) -> str:
    formats = fmt.joined(reading.model_values(comparison, "dtype") or ["unknown"])
    asked = comparison["settings"].get("weights") or "auto"
    devices = fmt.joined(reading.model_values(comparison, "device") or ["unknown"])
    return f"{formats} on {devices}" + ("" if asked == "auto" else f" (--weights {asked})")


def _link(comparison: JSON) -> str:
    links = [condition["link"] for condition in reading.links(comparison)]
    rtts = ", ".join(dict.fromkeys(f"{link['rtt_ms']:g}" for link in links))
    limits = {f"{link['bandwidth_mbps']:g} Mbit/s" for link in links if link["bandwidth_mbps"] is not None}
    limit = "".join(f", {each}" for each in sorted(limits))
    if links[0]["kind"] == "direct":
        return f"real: {comparison['link']}"
    buts = "".join(dict.fromkeys(map(fmt.but, links)))
    return f"emulated: round trips of {rtts} ms{limit}{buts}"


def _servers(comparison: JSON) -> str:
    connected = _connected(comparison)
    if not connected:
        return "all started for this comparison"
    ran = ", ".join(f"{fmt.name(name)} at {comparison['servers'][name]['address']}" for name in connected)
    others = "" if len(connected) == len(comparison["servers"]) else "; the others started for this comparison"
    return f"running already: {ran}{others}"


def _connected(comparison: JSON) -> list[str]:
    return [name for name, server in comparison["servers"].items() if not server["started_here"]]


def cautions(comparison: JSON) -> tuple[str, ...]:
    """Returns what makes the figures of a run doubtful as a whole: what is missing, and which servers are not alike."""
    partial = reading.partial(comparison)
    return (*([f"This run is partial: {partial}."] if partial else []), *comparison.get("caveats", ()))
