"""The distributed architecture: drafts locally, verifies at a TargetVerifier."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.checkpoints.tokenizers import same_tokens
from tandem.clients.head_fallback import with_features
from tandem.engine.batcher import Batcher
from tandem.engine.drafting import Drafting, load_drafting
from tandem.engine.generator import Generator
from tandem.engine.generators import fixed_length, stop_tokens, worker_info
from tandem.engine.model_config import ModelConfig
from tandem.rpc.credentials import Credentials
from tandem.rpc.errors import TandemError
from tandem.rpc.remote_verifier import RemoteVerifier
from tandem.rpc.run_stream import RunningVerifier
from tandem.rpc.traced import traced, traced_run
from tandem.rpc.verifier_client import VerifierClient
from tandem.rpc.verify_stream import StreamedVerifier
from tandem.speculation.depth import Depth, Pipeline
from tandem.speculation.drafters import BonusDrafter
from tandem.speculation.features import FeatureInbox, FeatureSpec
from tandem.speculation.lookahead import LookaheadPolicy, RunMeasurements
from tandem.speculation.loop import DraftThenVerify, Rounds
from tandem.speculation.never_waiting import NeverWaitingRounds
from tandem.speculation.pipeline import MAX_IN_FLIGHT, PipelinedRounds
from tandem.speculation.retry import Persistence
from tandem.speculation.round_statistics import RoundStatistics
from tandem.speculation.types import GenerationRequest, ModelInfo, Rule, SpeculationStats
from tandem.speculation.verification_mode import ChosenRounds, ModeChoice


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
    target = await _target_of(client, drafting, connect_seconds)
    try:
        drafting, features = with_features(drafting, target, client.address)
    except ValueError:
        await client.close()
        raise
    info, statistics = worker_info(target, drafting.draft, config), RoundStatistics()
    measured = RunMeasurements(steps=statistics.verify)
    rounds = _RequestRounds(client, drafting, info, target.vocab_size, pipeline, measured, features)
    return Generator(info, drafting.tokenizer, rounds.of, statistics=statistics), client


@dataclass(frozen=True, slots=True)
class _RequestRounds:
    """Builds the rounds of each request: those of one way to wait for the target, or of ways to choose from.

    `vocab_size`: the target's. `measured` is shared by all requests. `features`: those that a head reads.
    """

    client: VerifierClient
    drafting: Drafting
    info: ModelInfo
    vocab_size: int
    pipeline: Pipeline
    measured: RunMeasurements
    features: FeatureSpec | None = None

    def of(self, request: GenerationRequest, stats: SpeculationStats) -> Rounds:
        reads = self.features if request.models_draft else None
        inbox = FeatureInbox(reads, self.drafting.choice.features.context) if reads else None
        session = RemoteVerifier(self.client, request.of_models, stats, inbox)
        drafter = self._drafter(request, stats, inbox)
        # Under rejection tokens depend on drafts, and a head's drafts on which features have come: it waits for them.
        if self.pipeline is Pipeline.OFF or (inbox and request.rule is Rule.REJECTION):
            return DraftThenVerify(traced(session), drafter)
        pipelined = self._pipelined(session, drafter, request, stats)
        if self.pipeline is Pipeline.ON:
            return pipelined
        reach = LookaheadPolicy(self.info.max_speculation_length, self.measured, fixed_length(request, self.info))
        running = self._running(session, drafter, reach, request, stats)
        choice = ModeChoice(reach, MAX_IN_FLIGHT)

        def runs(now: bool | None) -> bool:
            if not session.max_unread:
                return False
            return self.pipeline is Pipeline.NEVER_WAITING or choice.runs(now, session.opening_rtt)

        return ChosenRounds(traced(session).open, runs, choice.took, pipelined, running, reach)

    def _drafter(self, request: GenerationRequest, stats: SpeculationStats, inbox: FeatureInbox | None) -> BonusDrafter:
        return traced(self.drafting.drafter(request.of_models, self.vocab_size, stats=stats, inbox=inbox), "open draft")

    def _pipelined(
        self, session: RemoteVerifier, drafter: BonusDrafter, request: GenerationRequest, stats: SpeculationStats
    ) -> PipelinedRounds:
        return PipelinedRounds(
            traced(StreamedVerifier(session, stats), "open" if self.pipeline is Pipeline.ON else ""),
            drafter,
            Depth(self.pipeline, MAX_IN_FLIGHT, self.measured.times),
            stats,
            self._most_total(request),
            request.max_new_tokens,
        )

    def _running(
        self,
        session: RemoteVerifier,
        drafter: BonusDrafter,
        reach: LookaheadPolicy,
        request: GenerationRequest,
        stats: SpeculationStats,
    ) -> NeverWaitingRounds:
        return NeverWaitingRounds(
            traced_run(RunningVerifier(session, stats, stop_tokens(request, self.info))),
            drafter,
            reach,
            stats,
            self._most_total(request),
            max(1, self.info.max_speculation_length),
            request.max_new_tokens,
        )

    def _most_total(self, request: GenerationRequest) -> int:
        return request.max_total_tokens or self.info.max_sequence_length


async def _target_of(client: VerifierClient, drafting: Drafting, connect_seconds: float) -> ModelInfo:
    """Returns the target's ModelInfo. Closes `client` and raises ValueError if none answers or its tokens differ."""
    try:
        target = await client.model_info(connect_seconds)
        same_tokens(drafting.tokenizer, target.tokenizer_sha256)
    except (TandemError, ValueError) as error:
        await client.close()
        raise ValueError(str(error)) from None
    return target
