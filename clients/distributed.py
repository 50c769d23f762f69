"""Architectures with models apart: local drafts verified elsewhere, and a local target with drafts from elsewhere."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial

from tandem.checkpoints.tokenizers import same_tokens
from tandem.engine.generator import Generator, MakeRounds
from tandem.engine.generators import Drafting, drafted_generator, fixed_length, stop_tokens, worker_info
from tandem.engine.load_models import Loaded
from tandem.engine.model_config import ModelConfig
from tandem.rpc.channel import DRAFT
from tandem.rpc.credentials import Credentials
from tandem.rpc.first_contact import first_of
from tandem.rpc.propose_stream import DraftClient, StreamedDrafts, WaitingDrafter
from tandem.rpc.received_errors import TandemError
from tandem.rpc.remote_session import RemoteSession
from tandem.rpc.tracing import traced
from tandem.rpc.verifier_client import VerifierClient
from tandem.rpc.verify_stream import RemoteVerifier, RunningVerifier
from tandem.runners.capabilities import FeaturesIn
from tandem.speculation.drafters import Drafter, PredictionDrafter
from tandem.speculation.estimate import Estimate
from tandem.speculation.fallible import FallibleDrafter
from tandem.speculation.features import FeatureInbox, FeatureSpec
from tandem.speculation.loop import Rounds
from tandem.speculation.never_waiting import DraftsElsewhere, NeverWaitingRounds
from tandem.speculation.request import Drafts
from tandem.speculation.retry import RETRY_SECONDS
from tandem.speculation.rounds import MAX_IN_FLIGHT, DraftedRounds
from tandem.speculation.types import GenerationRequest, ModelInfo, Rule, SpeculationStats
from tandem.speculation.verification_mode import ChosenRounds, Depth, LookaheadPolicy, Pipeline, never_waits

TARGET_SECONDS = 120.0  # default wait for a starting target


async def connect_distributed(
    drafting: Drafting,
    config: ModelConfig,
    target_address: str,
    connect_seconds: float,
    pipeline: Pipeline,
    credentials: Credentials | None = None,
    retry_seconds: float = RETRY_SECONDS,
) -> tuple[Generator, VerifierClient]:
    """Returns a generator and the client to close. `target_address` may list verifiers. Raises ValueError."""
    client = VerifierClient(
        target_address, drafting.tokenizer.sha256, retry_seconds=retry_seconds, credentials=credentials
    )
    target = await _target_of(client, drafting, connect_seconds)
    try:
        drafting, features = with_features(drafting, target, client.address)
    except ValueError:
        await client.close()
        raise
    info, estimate = worker_info(target, drafting.draft, config), Estimate()
    rounds = _rounds(client, drafting, info, pipeline, estimate, features)
    return Generator(info, drafting.tokenizer, rounds, estimate=estimate), client


def _rounds(
    client: VerifierClient,
    drafting: Drafting,
    info: ModelInfo,
    pipeline: Pipeline,
    estimate: Estimate,
    features: FeatureSpec | None,
) -> MakeRounds:
    # `estimate` is shared by all requests.

    def rounds(request: GenerationRequest, stats: SpeculationStats) -> Rounds:
        read = features if request.models_draft and not request.adapter and not request.predicted else None
        inbox = FeatureInbox(read, drafting.choice.feature_context) if read else None
        session = RemoteSession(client, request.of_models, stats, inbox)
        own = None if request.predicted else drafting.drafter(request.of_models, info.vocab_size, None, stats, inbox)
        drafter = traced(own or PredictionDrafter(request.predicted), "open draft")
        # Under rejection tokens depend on drafts, and a head's drafts on which features have come: it waits for them.
        if pipeline is Pipeline.OFF or (inbox and request.rule is Rule.REJECTION):
            return DraftedRounds(traced(RemoteVerifier(session, stats)), drafter, stats=stats)
        total, new = request.max_total_tokens or info.max_sequence_length, request.max_new_tokens
        streamed = traced(RemoteVerifier(session, stats), "open" if pipeline is Pipeline.ON else "")
        depth = Depth(pipeline, MAX_IN_FLIGHT, estimate)
        pipelined = DraftedRounds(streamed, drafter, depth, stats, total, new)
        if pipeline is Pipeline.ON:
            return pipelined
        lookahead = LookaheadPolicy(info.max_speculation_length, estimate, fixed_length(request, info))
        stepping = RunningVerifier(session, stats, stop_tokens(request, info))
        chunk = max(1, info.max_speculation_length)
        copies = request.drafts in (Drafts.AUTO, Drafts.LOOKUP) and drafting.choice.looks_up and not request.predicted
        running = NeverWaitingRounds(stepping, drafter, lookahead, stats, total, chunk, new, copies=copies)

        async def opens(prompt: Sequence[int]) -> bool:
            if begins := runs():
                running.begin(prompt)
            await traced(session).open(prompt)
            if begins and not session.max_unread:  # the server was replaced by one that runs no sessions
                await running.suspend(prompt)
                await drafter.close()
            return begins and session.max_unread > 0

        def runs() -> bool:
            return session.max_unread > 0 and never_waits(pipeline, lookahead.most, estimate, session.opening_rtt)

        return ChosenRounds(opens, runs, pipelined, running, lookahead)

    return rounds


async def _target_of(client: VerifierClient, drafting: Drafting, connect_seconds: float) -> ModelInfo:
    try:
        target = await client.model_info(connect_seconds)
        same_tokens(drafting.tokenizer, target.tokenizer_sha256)
    except (TandemError, ValueError) as error:
        await client.close()
        raise ValueError(str(error)) from None
    return target


log = logging.getLogger("tandem.drafter")


def with_features(drafting: Drafting, target: ModelInfo, address: str) -> tuple[Drafting, FeatureSpec | None]:
    """Returns the drafting for a target and the features it reads; without them lookup alone. Raises ValueError."""
    head = drafting.head
    if head is None:
        return drafting, None
    if not target.feature_layers:
        missing = f"{drafting.name} needs the target's features, and the TargetVerifier at {address} hands none out"
        if drafting.choice.kind in ("eagle", "model"):
            raise ValueError(f"draft: {missing}; start it with --hand_out_features, or use --draft hybrid or ngram")
        log.warning("draft: %s: n-gram lookup drafts alone", missing)
        return drafting.without_head(), None
    _check_fits(drafting, head, target, address)
    return drafting, FeatureSpec(head.layers, target.feature_size)


def _check_fits(drafting: Drafting, head: FeaturesIn, target: ModelInfo, address: str) -> None:
    where = f"the target at {address}"
    if lacking := [str(layer) for layer in head.layers if layer not in target.feature_layers]:
        known, wanted = ", ".join(map(str, target.feature_layers)), ",".join(map(str, head.layers))
        raise ValueError(
            f"draft: {drafting.name} reads layer {', '.join(lacking)}, and {where} hands out {known};"
            f" start it with --hand_out_features {wanted}"
        )
    sizes = ("hidden size", head.target_hidden_size, target.feature_size)
    for what, own, there in (sizes, ("vocabulary", drafting.vocab_size, target.vocab_size)):
        if own != there:
            raise ValueError(f"draft: {drafting.name} was made for a {what} of {own}, that of {where} is {there}")
    if head.weights_revision_read not in ("", target.weights_revision):
        raise ValueError(
            f"draft: {drafting.name} got its embedding from weights of revision {head.weights_revision_read}, and"
            f" {where} has {target.weights_revision}; name the same weights with --target_model"
        )


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
        remote = WaitingDrafter(client, request.of_models, target.runner.limits.vocab_size, stats, estimate)
        return FallibleDrafter(traced(remote, "open draft"), client.health, stats=stats)

    def elsewhere(request: GenerationRequest, stats: SpeculationStats) -> DraftsElsewhere:
        return StreamedDrafts(client, request.of_models, target.runner.limits.vocab_size, stats).run

    return drafted_generator(target, default_k, f"remote:{name}", drafter, pipeline, elsewhere), client
