"""Builds what a report states in sentences: settings, links, drafts, outputs that differ, failures, remarks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tandem.comparison.measuring.architectures import AUTOREGRESSIVE, DISTRIBUTED, PLAIN
from tandem.comparison.report import formatting as fmt
from tandem.comparison.report import reading
from tandem.comparison.report.blocks import (
    Block,
    Cell,
    Column,
    Details,
    Table,
    Text,
    bullets,
    numbers,
    paragraph,
    table,
    words,
)
from tandem.comparison.report.reading import JSON


def setting(comparison: JSON) -> str:
    """Describes models, dtype, device, length, sampling, prompts, link and machine in one line."""
    settings, base = comparison["settings"], reading.base(comparison)

    def each(key: str, missing: str = "unknown") -> str:
        return ", ".join(reading.model_values(comparison, key)) or missing

    rule = "" if base["rule"] == "agreement" else f", verified by {base['rule']}"
    parts = [
        f"target: {each('model_name')}",
        f"dtype {each('dtype')} on {each('device')}",
        f"drafter: {each('draft_name', 'none')}",
        f"k = {fmt.length(settings['speculation_length'])}" if "speculation_length" in settings else "",
        f"{fmt.sampling(base['sampling'])}{rule}",
        fmt.plural(len(settings["prompts"]), "prompt") if settings.get("prompts") else "",
        fmt.plural(settings["num_runs"], "run") if settings.get("num_runs") else "",
        f"at most {settings['max_new_tokens']} tokens each" if settings.get("max_new_tokens") else "",
        f"machine: {reading.machine(comparison['machine'])}",
        f"link: {comparison['link']}",
    ]
    return "; ".join(part for part in parts if part)


def found(comparison: JSON) -> list[Block]:
    """Returns what was found with how sure it is: the base's, and the rest folded."""
    tables = []
    of = comparison.get("statements", ())
    for condition in comparison["conditions"]:
        if own := [one for one in of if one["condition"] == condition["name"]]:
            is_link = condition["varies"] in ("base", "link")
            name = fmt.link_phrase(condition["link"]) if is_link else condition["name"]
            tables.append(_statements(fmt.capitalised(name), own))
    folded = sum(len(each.rows) for each in tables[1:])
    return [*tables[:1], *([Details(f"Under other conditions ({folded})", tuple(tables[1:]))] if folded else [])]


def _statements(caption: str, of: Sequence[JSON]) -> Table:
    rows: list[list[Cell | str]] = [
        [
            fmt.capitalised(one["text"]),
            Cell(one["sureness"], tone=one["sureness"]),
            fmt.span(one["interval"]),
            fmt.capitalised(one["reasons"][0]) if one["reasons"] else fmt.MISSING,
        ]
        for one in of
    ]
    heads = [*words("what was found", "how sure"), *numbers("95 % interval"), *words("first reason")]
    return table(caption, heads, rows, "comparison.json has all reasons, and what would make each statement surer.")


def run_setting(comparison: JSON) -> str:
    """Describes what was asked, in one line; the machine has a card of its own."""
    settings, base = comparison["settings"], reading.base(comparison)
    length = settings.get("speculation_length", 0)
    rule = "" if base["rule"] == "agreement" else f", verified by {base['rule']}"
    parts = [
        fmt.plural(len(settings["prompts"]), "prompt") if settings.get("prompts") else "",
        fmt.plural(settings["num_runs"], "run") if settings.get("num_runs", 1) > 1 else "",
        f"at most {settings['max_new_tokens']} tokens each" if settings.get("max_new_tokens") else "",
        f"{fmt.sampling(base['sampling'])}{rule}",
        "as many draft tokens a round as pay" if length is None else f"{length} draft tokens a round" if length else "",
    ]
    return ", ".join(part for part in parts if part)


def unmeasured(comparison: JSON) -> list[str]:
    """Says what else could have been measured or predicted, and with which flag."""
    found = []
    if len(reading.links(comparison)) < 2:
        found.append("Other links: one was measured (--rtt-ms 0,20,80).")
    if comparison["theory"] is None:
        found.append(why_no_theory(comparison))
    return found


def why_no_theory(comparison: JSON) -> str:
    if not set(reading.architectures(comparison)) & set(PLAIN):
        return "No predictions: plain decoding did not run, and every prediction starts from the cost of its step."
    if not any(reading.drafting(condition) for condition in comparison["conditions"]):
        return "No predictions: nothing was drafted, so there is no acceptance to predict from."
    return "No predictions: the component times that they start from were not measured in this run."


def basis(comparison: JSON) -> list[Text]:
    """Says what was measured on what, and what speedups and identity refer to."""
    lines = [setting(comparison)]
    if baseline := comparison["baseline"]:
        lines.append(
            "TTFT: time to the first token; TPOT: time per token after it; accept rate: share of draft tokens that the"
            " target accepted; mean accept length: tokens a round, the target's own included;"
            f" speedup: mean TPOT of {baseline['architecture']} (plain decoding, width {baseline['plain_width']})"
            " over that of the architecture; identical: to autoregressive (ref);"
            " bytes: between draft and target where they are apart, else at the client"
        )
    return [paragraph(line, "quiet") for line in lines]


def drafts(comparison: JSON) -> list[Text]:
    return [paragraph(line, "quiet") for line in _drafts(reading.base(comparison)["architectures"])]


def _drafts(found: JSON) -> Iterator[str]:
    """Accepted tokens by proposer, where there are several, and the lengths of drafts."""
    for name, of in found.items():
        if len(of["drafted_by"]) > 1:
            parts = (
                f"{who} {accepted} of {count} draft tokens ({fmt.number(accepted / count if count else None)})"
                for who, count in of["drafted_by"].items()
                for accepted in (of["accepted_by"].get(who, 0),)
            )
            yield f"accepted, {name}: {', '.join(parts)}"
    for name, of in found.items():
        if of["drafted"]:
            rounds = ", ".join(f"{count} with {n}" for n, count in enumerate(of["rounds_by_length"]) if count)
            mean = fmt.number(of["mean_draft_length"])
            yield f"drafted, {name}: {mean} tokens a round on average" + (rounds and f"; rounds: {rounds} draft tokens")


def rounds(comparison: JSON) -> Text:
    return bullets("", map(fmt.capitalised, notes(reading.base(comparison)["architectures"])))


def notes(found: JSON) -> list[str]:
    """Describes rounds sent ahead of verdicts, steps that did not wait, and what a head's features paid for."""
    lines = [
        f"{fmt.name(name)} had {fmt.number(ahead['mean_in_flight'])} rounds in flight on average (at most"
        f" {ahead['max_in_flight']}): of those sent ahead, {ahead['guessed_rounds']} were right and"
        f" {ahead['stale_rounds']} stale, with {ahead['stale_drafts']} draft tokens."
        for name, of in found.items()
        if (ahead := of.get("sent_ahead"))
    ]
    lines += [
        f"the target of {fmt.name(name)} made {ran['run_steps']} steps, {ran['drafted_steps']} with a draft, and"
        f" {ran['wasted_steps']} for nothing; {ran['unverified_drafts']} draft tokens were never verified."
        for name, of in found.items()
        if (ran := of.get("ran_on"))
    ]
    return [*lines, *_head(found)]


def _head(found: JSON) -> list[str]:
    """Compares an EAGLE-3 head with a draft model: acceptance gained against bytes from target to draft."""
    head, model = found.get("distributed_head"), found.get(DISTRIBUTED.name)
    if head is None or model is None or not (head["drafted"] and model["drafted"]):
        return []
    paid, before = head["bytes_down_per_token"], model["bytes_down_per_token"]
    if None in (paid, before):
        return []
    gained = head["mean_acceptance_length"] - model["mean_acceptance_length"]
    each = f": {(paid - before) / gained:,.0f} bytes a token for each token more in a round" if gained > 0 else ""
    return [
        f"head against draft model: accepted {head['acceptance_rate']:.3f} against {model['acceptance_rate']:.3f},"
        f" {head['mean_acceptance_length']:.2f} against {model['mean_acceptance_length']:.2f} tokens a round"
        f" ({gained:+.2f}), for {paid:,.0f} bytes a token down instead of {before:,.0f}{each}."
    ]


def remarks(comparison: JSON) -> list[Text]:
    return [paragraph(f"Remark: {remark}", "warning") for remark in comparison["remarks"]]


def divergences(comparison: JSON) -> Block:
    claims = [
        (condition["name"], name, of["identical_to_autoregressive"])
        for condition in comparison["conditions"]
        for name, of in condition["architectures"].items()
        if of["identical_to_autoregressive"] and (name != AUTOREGRESSIVE.name or condition["varies"] == "load")
    ]
    total = sum(claim["total"] for _, _, claim in claims)
    if not total:
        return paragraph("Outputs were not compared with plain decoding: it did not run, or no identity is claimed.")
    rows = [
        [
            fmt.name(name),
            condition,
            f"{d['prompt']}, run {d['run']}",
            str(d["position"]),
            *("ended" if d[key] is None else str(d[key]) for key in ("token", "autoregressive_token")),
            fmt.number(d["logit_gap"], 4),
        ]
        for condition, name, claim in claims
        for d in claim["divergences"]
    ]
    if not rows:
        return paragraph(f"Every output was token-identical to plain decoding ({total} of {total}).")
    listed = table(
        "Outputs that differ from plain decoding",
        [
            *words("architecture", "condition", "request"),
            *numbers("position", "token"),
            Column("plain decoding's token", brief="plain\ntoken"),
            Column("logit gap", brief="logit\ngap"),
        ],
        rows,
        "Position: of the first token that differs. Logit gap: between the two tokens that the target put first.",
    )
    same = sum(claim["count"] for _, _, claim in claims)
    return Details(f"Token-identical to plain decoding: {same} of {total} outputs. {len(rows)} differ", (listed,))


def failures(comparison: JSON) -> Block:
    failed = [
        [fmt.name(name), "", "warm-up", failure["code"], failure["message"]]
        for name, failure in comparison["warm_up_failures"].items()
    ]
    for record in reading.failures(comparison):
        error, request = record["error"], f"{record['prompt']}, run {record['run']}"
        failed.append([fmt.name(record["architecture"]), record["condition"], request, error["code"], error["message"]])
    shown = table("Failures", words("architecture", "condition", "request", "code", "message"), failed)
    listed: Block = shown if len(failed) <= 10 else Details(f"All {len(failed)} failures", (shown,))
    return listed if failed else paragraph("No request failed.")
