"""The distributed architecture's own side: drafts here, verifies at a TargetVerifier."""

from __future__ import annotations

from clients.errors import TandemError
from clients.remote import RemoteVerifier, VerifierClient
from models.assembly import ModelConfig, same_tokens, worker_info
from models.batcher import Batcher
from models.drafting import Drafting, load_drafting
from models.generator import Generator
from speculation.loop import DraftThenVerify, Rounds
from speculation.types import DraftLimit, GenerationRequest, SpeculationStats


async def open_distributed(
    config: ModelConfig, target_address: str, connect_seconds: float, batcher: Batcher
) -> tuple[Generator, VerifierClient]:
    """The distributed loop as a generator, and the client to close. Raises ValueErrors of one line.

    The verifier may still be loading: it is waited for up to `connect_seconds`.
    """
    return await connect_distributed(await load_drafting(config, batcher), config, target_address, connect_seconds)


async def connect_distributed(
    drafting: Drafting, config: ModelConfig, target_address: str, connect_seconds: float
) -> tuple[Generator, VerifierClient]:
    """Likewise, with what drafts loaded already."""
    client = VerifierClient(target_address, drafting.tokenizer.sha256)
    try:
        target = await client.model_info(connect_seconds)
        same_tokens(drafting.tokenizer, target.tokenizer_sha256)
    except (TandemError, ValueError) as error:
        await client.close()
        raise ValueError(str(error)) from None

    def rounds(request: GenerationRequest, stats: SpeculationStats, limit: DraftLimit) -> Rounds:
        verifier = RemoteVerifier(client, stats, request.report_margins, request.rule)
        return DraftThenVerify(verifier, drafting.drafter(target.vocab_size, request.rule, limit=limit))

    return Generator(worker_info(target, drafting.draft, config), drafting.tokenizer, rounds), client
