"""The distributed architecture's own side: drafts here, verifies at a TargetVerifier."""

from __future__ import annotations

from clients.errors import TandemError
from clients.remote import RemoteVerifier, VerifierClient
from models.assembly import ModelConfig, load_draft, make_drafter, own_tokenizer, same_tokens, worker_info
from models.batcher import Batcher
from models.generator import Generator
from speculation.loop import DraftThenVerify, Rounds
from speculation.types import GenerationRequest, SpeculationStats


async def open_distributed(
    config: ModelConfig, target_address: str, connect_seconds: float, batcher: Batcher
) -> tuple[Generator, VerifierClient]:
    """The distributed loop as a generator, and the client to close. Raises ValueErrors of one line.

    The verifier may still be loading: it is waited for up to `connect_seconds`.
    """
    draft = await load_draft(config, batcher, alone=True)
    tokenizer = draft.tokenizer if draft else await own_tokenizer(config)
    client = VerifierClient(target_address, tokenizer.sha256)
    try:
        target = await client.model_info(connect_seconds)
        same_tokens(tokenizer, target.tokenizer_sha256)
    except (TandemError, ValueError) as error:
        await client.close()
        raise ValueError(str(error)) from None

    def rounds(request: GenerationRequest, stats: SpeculationStats) -> Rounds:
        verifier = RemoteVerifier(client, stats, request.report_margins, request.rule)
        return DraftThenVerify(verifier, make_drafter(draft, target.vocab_size, config.draft, request.rule))

    return Generator(worker_info(target, draft, config), tokenizer, rounds), client
