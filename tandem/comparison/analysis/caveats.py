"""Says where servers that are compared are not alike: on other machines, or started by other hands."""

from __future__ import annotations

from collections.abc import Sequence

from tandem.comparison.measuring.deployment import Endpoint
from tandem.comparison.report.formatting import joined, name_in_sentence
from tandem.rpc.credentials import on_this_machine

SETTINGS = ("backend", "device", "dtype", "kv_slots", "max_sequence_length", "plain_width")
"""The fields of a server's description in which settings show."""
THIS_MACHINE = "this machine"


def caveats(endpoints: Sequence[Endpoint]) -> list[str]:
    """Returns what is to be said before any figure: that some servers ran already, and what differs between them."""
    given = [e for e in endpoints if e.log is None]
    started = [e for e in endpoints if e.log is not None]
    hosts = list(dict.fromkeys(_host(e) for e in endpoints))
    said: list[str] = []
    said_of_steps = _rehearsed(endpoints)
    if given and started:
        said.append(
            f"Not all servers were started alike: {joined([_described(e) for e in given])} ran already;"
            f" {joined([name_in_sentence(e.architecture.name) for e in started])} were started here, without prefix"
            " sharing. What servers do not tell may differ as well: processor, threads, prefix sharing."
        )
    if len(hosts) > 1:
        said.append(f"More than one machine is compared ({joined(hosts)}): a ratio may be that of the machines.")
    elif hosts and hosts[0] != THIS_MACHINE:
        said.append(f"All servers ran on {hosts[0]}: how busy that machine was is not known here.")
    if said and (apart := _differing(endpoints)):
        said.append(f"The servers' settings differ: {apart}.")
    if given and started:
        said.append("Connect all of them, or none, for a comparison of architectures alone.")
    return [*said_of_steps, *said]


def _rehearsed(endpoints: Sequence[Endpoint]) -> list[str]:
    """Says whose step times were taken, and how many steps took longer here."""
    told = [each for endpoint in endpoints for each in endpoint.model.rehearsals]
    if not told:
        return []
    first, steps, late = told[0], sum(each.steps for each in told), sum(each.late_steps for each in told)
    by = 1000 * sum(each.late_seconds for each in told) / late if late else 0.0
    counted = f"{late} of {steps} steps were late" + (f", by {by:.1f} ms on average" if late else "")
    if all(each.part == "draft" for each in told):
        counted += " (drafts; those of targets are in their logs)"
    return [
        f"Rehearsed: real models and a real wire, with steps that take the times of {first.device} ({first.source}),"
        f" not this machine's; {counted}."
    ]


def unlike(endpoints: Sequence[Endpoint], name: str, other: str) -> str | None:
    """Says how the servers of two architectures are not alike; None if nothing is known to be."""
    by_name = {e.architecture.name: e for e in endpoints}
    if name not in by_name or other not in by_name:
        return None
    pair = by_name[name], by_name[other]
    hosts = [_host(e) for e in pair]
    if hosts[0] != hosts[1]:
        first, second = (f"{name_in_sentence(e.architecture.name)} on {_host(e)}" for e in pair)
        return f"{first} is compared with {second}"
    if (pair[0].log is None) != (pair[1].log is None):
        given = next(e for e in pair if e.log is None)
        return f"the server of {name_in_sentence(given.architecture.name)} ran already, with settings of its own"
    return None


def _described(endpoint: Endpoint) -> str:
    return f"{name_in_sentence(endpoint.architecture.name)} at {endpoint.address}"


def _host(endpoint: Endpoint) -> str:
    host = endpoint.address.rpartition(":")[0].strip("[]")
    return THIS_MACHINE if endpoint.log is not None or on_this_machine(host) else host


def _differing(endpoints: Sequence[Endpoint]) -> str:
    """Lists the settings that servers tell and in which they differ."""
    parts: list[str] = []
    for field in SETTINGS:
        values: dict[str, list[str]] = {}
        for e in endpoints:
            values.setdefault(str(getattr(e.model, field)), []).append(name_in_sentence(e.architecture.name))
        if len(values) > 1:
            each = "; ".join(f"{value} at {joined(names)}" for value, names in values.items())
            parts.append(f"{field.replace('_', ' ')} ({each})")
    return ", ".join(parts)
