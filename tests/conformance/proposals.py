"""Cases of Propose, spoken directly to a DraftWorker."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tandem.v1 import draft_worker_pb2 as pb
from tandem.v1 import generation_pb2
from tests.conformance.bench import Bench
from tests.support import HANG
from tests.support import refusal as refused


def _asking(bench: Bench, **changes: Any) -> pb.ProposeRequest:
    fields: dict[str, Any] = {
        "tokens": bench.prompt(),
        "speculation_length": 3,
        "sampling": generation_pb2.Sampling(temperature=0.0),
    }
    return pb.ProposeRequest(**(fields | changes))


async def _answers(bench: Bench, *messages: pb.ProposeRequest) -> list[Sequence[int]]:
    """The drafts of one stream."""
    return [list(reply.draft_tokens) async for reply in bench.worker.Propose(iter(messages), timeout=HANG)]


async def same_tokens_same_proposal(bench: Bench) -> None:
    """The same tokens get the same draft in every stream; a later message's tokens follow those before."""
    first = await _answers(bench, _asking(bench))
    further = pb.ProposeRequest(tokens=[7], speculation_length=3)
    again = await _answers(bench, _asking(bench), further)
    whole = await _answers(bench, _asking(bench, tokens=[*bench.prompt(), 7]))
    assert again == [*first, *whole] and len(first[0]) <= 3


async def bad_proposal_fields(bench: Bench) -> None:
    """Each bad field of a proposal is INVALID_ARGUMENT and named; another tokenizer is refused."""
    for field, change in (
        ("speculation_length", {"speculation_length": bench.info.max_speculation_length + 1}),
        ("least_probability", {"least_probability": 1.5}),
        ("least_probability", {"least_probability": math.nan}),
        ("tokens", {"tokens": [bench.info.vocab_size]}),
        ("tokens", {"tokens": []}),
        ("sampling", {"sampling": None}),
        ("temperature", {"sampling": generation_pb2.Sampling(temperature=-1.0)}),
    ):
        refusal = await refused(_answers(bench, _asking(bench, **change)))
        assert (refusal.code, refusal.field) == ("INVALID_ARGUMENT", field), f"{change}: {refusal}"
    refusal = await refused(_answers(bench, _asking(bench, tokenizer_sha256="0" * 64)))
    assert (refusal.code, refusal.reason) == ("FAILED_PRECONDITION", "TOKENIZER_MISMATCH"), refusal
