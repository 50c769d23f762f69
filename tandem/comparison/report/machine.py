"""Builds the card of the machine, and the cautions that stand above a decision."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from tandem.comparison.report import formatting as fmt
from tandem.comparison.report import reading
from tandem.comparison.report.reading import JSON

COMPARABLE = ("model_name", "weights_revision", "dtype", "device", "backend", "max_sequence_length", "kv_slots")
"""What a server says of itself that changes its figures."""
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
        if known := [load[key] for load in loads if load[key] is not None]:
            said.append(what.format(fmt.percent(statistics.fmean(known))))
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
    rtts = ", ".join(f"{link['rtt_ms']:g}" for link in links)
    limits = {f"{link['bandwidth_mbps']:g} Mbit/s" for link in links if link["bandwidth_mbps"] is not None}
    limit = "".join(f", {each}" for each in sorted(limits))
    if links[0]["kind"] == "direct":
        return f"real: {comparison['link']}"
    return f"emulated: round trips of {rtts} ms{limit}"


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
    """Returns what makes the figures of this run doubtful as a whole, in the order of its weight."""
    return tuple(_cautions(comparison))


def _cautions(comparison: JSON) -> Iterator[str]:
    if partial := reading.partial(comparison):
        yield f"This run is partial: {partial}."
    connected, servers = _connected(comparison), comparison["servers"]
    started = [name for name in servers if name not in connected]
    if connected and started:
        ran = fmt.joined([fmt.name_in_sentence(name) for name in connected])
        here = fmt.joined([fmt.name_in_sentence(name) for name in started])
        yield (
            f"Not started alike: {ran} ran already and {here} started here, without sharing of prefixes and perhaps on"
            " another machine. A ratio between them may be one of machines or settings. Connect all, or none."
        )
    elif len({servers[name]["address"].rpartition(":")[0] for name in connected}) > 1:
        yield "The servers ran on several addresses: a ratio between them may be one of machines."
    for field in COMPARABLE:
        values = {name: server["model"].get(field) for name, server in servers.items()}
        values = {name: value for name, value in values.items() if value not in (None, "")}
        if len(set(map(str, values.values()))) > 1:
            each = ", ".join(f"{fmt.name_in_sentence(name)} {value}" for name, value in values.items())
            yield f"Settings differ, {field.replace('_', ' ')}: {each}."
