"""Cases of Propose and EndProposals, spoken directly to a DraftWorker."""

from __future__ import annotations

from typing import Any

from tandem.v1 import draft_worker_pb2 as pb
from tandem.v1 import generation_pb2
from tests.conformance.bench import Bench, refused
from tests.support import HANG


def _asking(bench: Bench, **changes: Any) -> pb.ProposeRequest:
    fields: dict[str, Any] = {
        "session_id": "conformance",
        "tokens": bench.prompt(),
        "speculation_length": 3,
        "sampling": generation_pb2.Sampling(temperature=0.0),
    }
    return pb.ProposeRequest(**(fields | changes))


async def _end(bench: Bench) -> bool:
    reply = await bench.worker.EndProposals(pb.EndProposalsRequest(session_id="conformance"), timeout=HANG)
    return bool(reply.ended)


async def same_tokens_same_proposal(bench: Bench) -> None:
    """Asking again for the same tokens proposes the same; a token more than was known is followed."""
    first = await bench.worker.Propose(_asking(bench), timeout=HANG)
    again = await bench.worker.Propose(_asking(bench), timeout=HANG)
    assert list(again.draft_tokens) == list(first.draft_tokens) and len(first.draft_tokens) <= 3
    known = len(bench.prompt())
    on = await bench.worker.Propose(_asking(bench, known_length=known, tokens=[7]), timeout=HANG)
    assert not on.unknown
    assert await _end(bench) and not await _end(bench)


async def unknown_tokens_are_asked_for(bench: Bench) -> None:
    """A session that is not there, or knows fewer tokens than its caller thinks, asks for all of them."""
    assert (await bench.worker.Propose(_asking(bench, known_length=4), timeout=HANG)).unknown
    await bench.worker.Propose(_asking(bench), timeout=HANG)
    assert (await bench.worker.Propose(_asking(bench, known_length=99, tokens=[]), timeout=HANG)).unknown
    await _end(bench)


async def bad_proposal_fields(bench: Bench) -> None:
    """Each bad field of a proposal is INVALID_ARGUMENT and named; another tokenizer is refused."""
    for field, change in (
        ("session_id", {"session_id": ""}),
        ("speculation_length", {"speculation_length": bench.info.max_speculation_length + 1}),
        ("tokens", {"tokens": [bench.info.vocab_size]}),
        ("tokens", {"tokens": []}),
        ("sampling", {"sampling": None}),
        ("temperature", {"sampling": generation_pb2.Sampling(temperature=-1.0)}),
    ):
        refusal = await refused(bench.worker.Propose(_asking(bench, **change), timeout=HANG))
        assert (refusal.code, refusal.field) == ("INVALID_ARGUMENT", field), f"{change}: {refusal}"
    refusal = await refused(bench.worker.Propose(_asking(bench, tokenizer_sha256="0" * 64), timeout=HANG))
    assert (refusal.code, refusal.reason) == ("FAILED_PRECONDITION", "TOKENIZER_MISMATCH"), refusal
    assert not await _end(bench), "a refused proposal left a session behind"
