"""Architecture remote_draft: a local target verifies a DraftWorker's drafts."""

from __future__ import annotations

from functools import partial

from tandem.engine.generator import Generator
from tandem.engine.generators import drafted_generator
from tandem.engine.loading import Loaded
from tandem.rpc.channel import DRAFT
from tandem.rpc.credentials import Credentials
from tandem.rpc.errors import TandemError
from tandem.rpc.first_contact import first_of
from tandem.rpc.propose_stream import StreamedDrafts
from tandem.rpc.remote_drafter import DraftClient, RemoteDrafter
from tandem.rpc.tracing import traced
from tandem.speculation.drafters import Drafter
from tandem.speculation.estimate import Estimate
from tandem.speculation.fallible import FallibleDrafter
from tandem.speculation.never_waiting import DraftsElsewhere
from tandem.speculation.types import GenerationRequest, SpeculationStats
from tandem.speculation.verification_mode import Pipeline


async def open_remote_draft(
    target: Loaded,
    default_k: int | None,
    draft_address: str,
    draft_seconds: float,
    credentials: Credentials | None = None,
    pipeline: Pipeline = Pipeline.OFF,
) -> tuple[Generator, DraftClient]:
    """Returns a generator, which decodes plainly without the worker, and the client to close. Raises ValueError."""
    client = DraftClient(draft_address, target.tokenizer.sha256, draft_seconds, credentials)
    name = draft_address
    try:
        asks = {draft_address: partial(client.info, wait=False)}
        name = (await first_of(asks, credentials, draft_seconds, draft_seconds, DRAFT))[1].draft_name
    except TandemError as error:
        client.health.failed(error)
    except ValueError:
        await client.close()
        raise

    def drafter(request: GenerationRequest, stats: SpeculationStats, estimate: Estimate) -> Drafter:
        remote = RemoteDrafter(client, request.of_models, target.runner.limits.vocab_size, stats, estimate)
        return FallibleDrafter(traced(remote, "open draft"), client.health, stats=stats)

    def elsewhere(request: GenerationRequest, stats: SpeculationStats) -> DraftsElsewhere:
        return StreamedDrafts(client, request.of_models, target.runner.limits.vocab_size, stats).run

    return drafted_generator(target, default_k, f"remote:{name}", drafter, pipeline, elsewhere), client
