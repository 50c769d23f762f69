"""Configuration of the server roles."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from tandem.checkpoints.generation_config import GENERATION_CONFIG, generation_defaults
from tandem.clients.distributed import TARGET_SECONDS
from tandem.clients.prefill_client import PrefillConfig
from tandem.engine.engine import Engine
from tandem.engine.generator import RequestDefaults
from tandem.engine.model_config import ModelConfig
from tandem.engine.prefix_cache import PrefixSharing
from tandem.engine.slots import MAX_WAITING
from tandem.engine.step_watch import StepBound
from tandem.rpc.credentials import Credentials
from tandem.runners.backends import backend_named
from tandem.services.server import ServeConfig
from tandem.speculation.types import InvalidField, Request
from tandem.speculation.verification_mode import Pipeline

log = logging.getLogger("tandem.server")


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleConfig:
    """A role's configuration; tandem/cli/flags.py has defaults and meaning of each flag.

    None: no target (`target_address`), no limit (`queue`), measured (`step_seconds`), full length (`kv_cache_mb`).
    `own_length`, `own_slots`: what fits in memory instead of `models.shape`. `command`: starts other ranks.
    """

    serve: ServeConfig
    models: ModelConfig
    target_address: str | None
    draft_address: str | None
    draft_seconds: float
    lease_seconds: float
    profile: bool
    pipeline: Pipeline
    metrics_host: str
    metrics_port: int | None = None
    otlp_endpoint: str | None = None
    reconnect_seconds: float
    queue: int
    credentials: Credentials
    step_seconds: float | None
    defaults: RequestDefaults
    command: tuple[str, ...]
    prefixes: PrefixSharing
    generation_config: str
    prefill: PrefillConfig | None
    settle: str | None = None
    receipt_keys: str | None = None
    receipt_key_days: float
    own_length: bool = False
    own_slots: bool = False
    kv_cache_mb: int | None = None
    connect_seconds: float = TARGET_SECONDS

    def __post_init__(self) -> None:
        for address in (self.target_address, self.draft_address, self.prefill.addresses if self.prefill else None):
            if address is not None:
                self.credentials.check(address)
        if self.generation_config not in ("auto", "none"):
            raise ValueError(f"generation_config: {self.generation_config!r} is neither auto nor none")
        if not 0 <= self.queue <= MAX_WAITING:
            raise ValueError(f"queue: {self.queue} is outside 0 to {MAX_WAITING}")
        if self.kv_cache_mb is not None and self.kv_cache_mb < 1:
            raise ValueError(f"kv_cache_mb: {self.kv_cache_mb} is below 1")
        if self.step_seconds != 0:
            StepBound(self.step_seconds)
        if self.metrics_port is not None and not 0 <= self.metrics_port <= 65535:
            raise ValueError(f"metrics_port: {self.metrics_port} is outside 0 to 65535")
        for name in ("draft_seconds", "receipt_key_days"):
            if not (value := getattr(self, name)) > 0:
                raise ValueError(f"{name}: {value} is not above 0")


def defaults_in_force(config: RoleConfig, engine: Engine | None = None) -> RequestDefaults:
    """Returns and logs the defaults, without those of the file that `engine` lacks. Raises ValueError."""
    defaults, models = config.defaults, config.models
    if engine:
        engine.admit(Request(defaults.sampling))
    if config.generation_config == "auto" and (engine or models.model not in (None, models.draft.model)):
        found = defaults.over(generation_defaults(backend_named(models.backend).find(models.model)), GENERATION_CONFIG)
        try:
            if engine:
                engine.admit(Request(found.sampling))
            defaults = found
        except InvalidField as error:
            log.warning("%s is left out: %s", GENERATION_CONFIG, error)
    log.info("requests that do not say otherwise have: %s", defaults)
    return defaults
