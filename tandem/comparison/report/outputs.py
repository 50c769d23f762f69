"""Shows the answers to each prompt side by side: one text where all are the same, marked where one differs."""

from __future__ import annotations

import re
from collections.abc import Sequence

from tandem.comparison.measuring.architectures import AUTOREGRESSIVE
from tandem.comparison.measuring.identity import first_difference
from tandem.comparison.report import formatting as fmt
from tandem.comparison.report import reading
from tandem.comparison.report.blocks import Block, Details, Output, Outputs, paragraph
from tandem.comparison.report.reading import JSON

MOST_SAME = 3
"""The number of prompts with one answer that are shown; more are folded."""


def answers(comparison: JSON) -> list[Block]:
    """Returns the answers to every prompt: of other conditions than the base's only those that differ."""
    groups: dict[tuple[str, str, int], list[JSON]] = {}
    for record in comparison["records"]:
        if not record["error"] and record.get("text") is not None:
            groups.setdefault((record["condition"], record["prompt"], record["run"]), []).append(record)
    base = reading.base(comparison)["name"]
    rules = {condition["name"]: condition["rule"] for condition in comparison["conditions"]}
    differing: list[Outputs] = []
    same: list[Outputs] = []
    for (condition, prompt, run), records in groups.items():
        alike = len({tuple(record["output_token_ids"]) for record in records}) == 1
        if alike and (condition != base or run):
            continue
        title = ", ".join([prompt, *([f"run {run}"] if run else []), *([condition] if condition != base else [])])
        (same if alike else differing).append(_side_by_side(title, records, rules.get(condition, "agreement")))
    if not (same or differing):
        return []
    folded = (Details(f"The other {len(same) - MOST_SAME} prompts, answered alike", tuple(same[MOST_SAME:])),)
    return [
        paragraph(_summary(comparison)),
        *differing,
        *same[:MOST_SAME],
        *(folded if len(same) > MOST_SAME else ()),
    ]


def _summary(comparison: JSON) -> str:
    claims = [
        of["identical_to_autoregressive"]
        for condition in comparison["conditions"]
        for name, of in condition["architectures"].items()
        if of["identical_to_autoregressive"] and name != AUTOREGRESSIVE.name
    ]
    total, count = sum(claim["total"] for claim in claims), sum(claim["count"] for claim in claims)
    if not total:
        return "No answer was compared with plain decoding's."
    if count == total:
        return f"All {total} answers compared are plain decoding's, token for token. A text is shown once."
    return f"{total - count} of {total} answers differ from plain decoding's: each is shown beside it."


def _side_by_side(title: str, records: Sequence[JSON], rule: str) -> Outputs:
    """Groups equal answers. The first is plain decoding's, if it answered."""
    by_tokens: dict[tuple[int, ...], list[JSON]] = {}
    for record in sorted(records, key=lambda record: record["architecture"] != AUTOREGRESSIVE.name):
        by_tokens.setdefault(tuple(record["output_token_ids"]), []).append(record)
    (tokens, first), *others = by_tokens.items()
    said = "The same tokens from all." if not others else f"{len(by_tokens)} different answers."
    if others and rule != "agreement":
        said += f" Under the rule {rule} the texts may differ."
    return Outputs(
        title,
        said,
        (
            Output(_names(first), first[0]["text"]),
            *(_against(tokens, first[0]["text"], own, found) for own, found in others),
        ),
    )


def _names(records: Sequence[JSON]) -> str:
    return fmt.joined([fmt.name_in_sentence(record["architecture"]) for record in records])


def _against(plain: tuple[int, ...], plain_text: str, own: tuple[int, ...], records: Sequence[JSON]) -> Output:
    """Marks the word in which the text first differs, and names the token."""
    at, text = first_difference(plain, own) or 0, records[0]["text"]
    here, there = (f"token {ids[at]}" if at < len(ids) else "the end" for ids in (own, plain))
    note = f"From position {at} on: {here} in place of {there}."
    start = first_difference(plain_text, text)
    if start is None:
        return Output(_names(records), text, note=f"{note} The text is the same.")
    word = re.match(r"\s*\S*", text[start:])
    end = start + (word.end() if word else 0)
    return Output(_names(records), text[:start], text[start:end], text[end:], note)
