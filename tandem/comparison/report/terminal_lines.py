"""Describes a comparison in lines for the terminal: settings, links, drafts, differing outputs, failures."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict

from tandem.comparison.analysis.summary import Summary
from tandem.comparison.measuring.conditions import LinkChoice
from tandem.comparison.measuring.deployment import baseline_of
from tandem.comparison.measuring.records import Record
from tandem.comparison.report import formatting as fmt
from tandem.comparison.report.files import Comparison, ConditionResult
from tandem.comparison.report.head_line import head_line
from tandem.speculation.types import Rule

SHOWN = 5
"""The number of failures and differing outputs listed; comparison.json lists all."""


def settings(comparison: Comparison) -> Iterator[str]:
    """The machine, the models, the request settings and the baseline."""
    config = comparison.config
    models = [endpoint.model for endpoint in comparison.endpoints]
    drafters = dict.fromkeys(model.draft_name for model in models if model.draft_name)
    sampling = config.sampling
    runs = fmt.plural(config.num_runs, "run") + ("" if config.num_runs == 1 else " each")
    how = "greedy" if sampling.greedy else f"temperature {sampling.temperature:g}, seed {sampling.seed}"
    how += "" if config.rules[0] is Rule.AGREEMENT else f", verified by {config.rules[0].value}"
    yield f"machine: {comparison.machine}"
    yield (
        f"target: {_names(model.model_name for model in models)}; dtype {_names(model.dtype for model in models)}"
        f" on {_names(model.device for model in models)}; drafter: {', '.join(drafters) or 'none'};"
        f" k = {fmt.length(config.speculation_length)}; {how}; {len(config.prompts)} prompts, {runs},"
        f" at most {config.max_new_tokens} tokens each; link: {comparison.link}"
    )
    baseline = baseline_of(list(comparison.endpoints))
    if baseline:
        yield (
            f"speedup: mean TPOT of {baseline.architecture.name} (plain decoding, width {baseline.model.plain_width})"
            " over that of the architecture; identical: to autoregressive (ref);"
            " bytes: between draft and target where they are apart, else at the client"
        )


def links(comparison: Comparison) -> Iterator[str]:
    """The measured round trip of each link, and what its emulation adds."""
    shown: set[LinkChoice] = set()
    for result in comparison.results:
        link, measured = result.condition.link, result.link
        if measured is not None and link not in shown:
            shown.add(link)
            yield (
                f"{comparison.config.link} {link}: a small message takes {1000 * measured.link_p50_s:.2f} ms for a"
                f" round trip, {1000 * measured.added_s:.2f} ms more than configured plus the"
                f" {1000 * measured.direct_p50_s:.2f} ms without the link"
            )


def proposers(summaries: Sequence[Summary]) -> Iterator[str]:
    """Accepted tokens by proposer, for architectures with more than one proposer."""
    for summary in summaries:
        drafted, accepted = summary.acceptance.drafted_by, summary.acceptance.accepted_by
        if len(drafted) > 1:
            parts = (
                f"{who} {accepted.get(who, 0)} of {count} draft tokens ({accepted.get(who, 0) / count:.2f})"
                for who, count in drafted.items()
            )
            yield f"accepted, {summary.architecture}: {', '.join(parts)}"


def heads(summaries: Sequence[Summary]) -> Iterator[str]:
    """What the features of a head paid for."""
    line = head_line(
        {
            each.architecture: {**asdict(each.acceptance), "bytes_down_per_token": each.bytes_down_per_token}
            for each in summaries
        }
    )
    if line is not None:
        yield line


def rounds_in_flight(summaries: Sequence[Summary]) -> Iterator[str]:
    """How far ahead of verdicts rounds were sent, and how many of them were stale."""
    for summary in summaries:
        if (ahead := summary.sent_ahead) is not None:
            yield (
                f"rounds in flight, {summary.architecture}: {ahead.mean_in_flight:.2f} on average, at most"
                f" {ahead.max_in_flight}; sent ahead and right {ahead.guessed_rounds}, stale {ahead.stale_rounds}"
                f" ({ahead.stale_drafts} draft tokens)"
            )


def steps_without_waiting(summaries: Sequence[Summary]) -> Iterator[str]:
    """What targets that never wait spent, and what of it was for nothing."""
    for summary in summaries:
        if (ran := summary.ran_on) is not None:
            yield (
                f"steps without waiting, {summary.architecture}: {ran.run_steps}, {ran.drafted_steps} with a draft,"
                f" {ran.wasted_steps} wasted; {ran.unverified_drafts} draft tokens never verified"
            )


def divergences(results: Sequence[ConditionResult]) -> Iterator[str]:
    """The outputs that differ from the autoregressive ones, up to SHOWN for each architecture."""
    for result in results:
        for summary in result.summaries:
            yield from _divergences_of(summary, "" if result is results[0] else f" ({result.condition.name})")


def _divergences_of(summary: Summary, condition: str) -> Iterator[str]:
    found = summary.identical.divergences if summary.identical else ()
    if not found or not summary.identical:
        return
    yield (
        f"{summary.architecture} differs from the autoregressive output on {len(found)} of {summary.identical.total}"
        f"{condition}:"
    )
    for one in found[:SHOWN]:
        gap = "unknown" if one.logit_gap is None else f"{one.logit_gap:.4g}"
        yield (
            f"  {one.prompt}, run {one.run}, token {one.position}: {one.token} instead of"
            f" {one.autoregressive_token}, logit gap {gap}"
        )
    if len(found) > SHOWN:
        yield f"  and {len(found) - SHOWN} more, in comparison.json"


def failures(comparison: Comparison) -> Iterator[str]:
    """The failed warm-ups and up to SHOWN failed requests."""
    for name, failure in comparison.warm_up_failures:
        yield f"{name} failed to warm up: {failure.code}: {failure.message}"
    yield from (_failure_line(record) for record in comparison.failed[:SHOWN])
    if len(comparison.failed) > SHOWN:
        yield f"and {len(comparison.failed) - SHOWN} more failures, in comparison.json"


def _failure_line(record: Record) -> str:
    why = f"{record.error.code}: {record.error.message}" if record.error else ""
    return f"{record.architecture} failed on {record.prompt}, run {record.run}: {why}"


def draft_lengths(summaries: Sequence[Summary]) -> Iterator[str]:
    """The draft lengths of architectures that drafted."""
    for summary in summaries:
        if summary.acceptance.drafted:
            rounds = ", ".join(f"{n}: {count}" for n, count in enumerate(summary.acceptance.rounds_by_length))
            yield (
                f"drafted, {summary.architecture}: {fmt.number(summary.acceptance.mean_draft_length)} tokens a"
                f" round on average; rounds by draft tokens: {rounds}"
            )


def _names(values: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(values)) or "unknown"
