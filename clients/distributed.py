"""The distributed architecture: drafts locally, verifies at a TargetVerifier."""

from __future__ import annotations

from tandem.checkpoints.tokenizers import same_tokens
from tandem.engine.batcher import Batcher
from tandem.engine.drafting import Drafting, load_drafting
from tandem.engine.generator import Generator
from tandem.engine.generators import worker_info
from tandem.engine.loading import ModelConfig
from tandem.rpc.credentials import Credentials
from tandem.rpc.endpoint_pool import Persistence
from tandem.rpc.errors import TandemError
from tandem.rpc.remote_verifier import RemoteVerifier
from tandem.rpc.traced_rounds import traced_bonus_drafter, traced_flights, traced_verifier
from tandem.rpc.verifier_client import VerifierClient
from tandem.rpc.verify_stream import StreamedVerifier
from tandem.speculation.depth import Depth, Pipeline
from tandem.speculation.loop import DraftThenVerify, Rounds
from tandem.speculation.pipeline import MAX_IN_FLIGHT, PipelinedRounds
from tandem.speculation.step_times import MeasuredTimes
from tandem.speculation.types import GenerationRequest, SpeculationStats


async def open_distributed(
    config: ModelConfig,
    target_address: str,
    connect_seconds: float,
    batcher: Batcher,
    pipeline: Pipeline = Pipeline.AUTO,
    credentials: Credentials | None = None,
    persistence: Persistence | None = None,
) -> tuple[Generator, VerifierClient]:
    """Loads the draft model and returns a distributed generator and the client to close. Raises ValueError.

    `target_address` may list several verifiers, HOST:PORT,HOST:PORT. They may still be loading: waits up to
    `connect_seconds` for the first answer. `persistence`: how long a request keeps retrying when they are gone.
    """
    drafting = await load_drafting(config, batcher)
    return await connect_distributed(
        drafting, config, target_address, connect_seconds, pipeline, credentials, persistence
    )


async def connect_distributed(
    drafting: Drafting,
    config: ModelConfig,
    target_address: str,
    connect_seconds: float,
    pipeline: Pipeline = Pipeline.AUTO,
    credentials: Credentials | None = None,
    persistence: Persistence | None = None,
) -> tuple[Generator, VerifierClient]:
    """Like `open_distributed`, with a draft model that is already loaded."""
    client = VerifierClient(target_address, drafting.tokenizer.sha256, persistence=persistence, credentials=credentials)
    try:
        target = await client.model_info(connect_seconds)
        same_tokens(drafting.tokenizer, target.tokenizer_sha256)
    except (TandemError, ValueError) as error:
        await client.close()
        raise ValueError(str(error)) from None

    info, times = worker_info(target, drafting.draft, config), MeasuredTimes()

    def rounds(request: GenerationRequest, stats: SpeculationStats) -> Rounds:
        drafter = traced_bonus_drafter(drafting.drafter(target.vocab_size, request.rule, stats=stats))
        if pipeline is Pipeline.OFF:
            verifier = RemoteVerifier(client, stats, request.report_margins, request.rule, request.deadline)
            return DraftThenVerify(traced_verifier(verifier), drafter)
        return PipelinedRounds(
            traced_flights(StreamedVerifier(client, stats, request.report_margins, request.rule, request.deadline)),
            drafter,
            Depth(pipeline, MAX_IN_FLIGHT, times),
            stats,
            request.max_total_tokens or info.max_sequence_length,
            request.max_new_tokens,
        )

    return Generator(info, drafting.tokenizer, rounds), client
