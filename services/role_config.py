"""Configuration of the server roles."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.clients.distributed import TARGET_SECONDS
from tandem.clients.prefill_client import PrefillConfig
from tandem.engine.generator import RequestDefaults
from tandem.engine.model_config import ModelConfig
from tandem.engine.prefix_cache import PrefixSharing
from tandem.engine.slots import MAX_WAITING
from tandem.engine.step_watch import StepBound
from tandem.rpc.credentials import Credentials
from tandem.services.observability.setup import ObservabilityConfig
from tandem.services.receipts import ReceiptConfig
from tandem.services.server import ServeConfig
from tandem.speculation.depth import Pipeline


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleConfig:
    """Configuration of a server role, validated once. The defaults are those of the options (tandem/cli/flags.py).

    `draft_address`: the DraftWorker that drafts for a target, each draft within `draft_seconds`. `target_address` None:
    the DraftWorker has no target and only proposes. `credentials` are used to call either. `pipeline`: whether
    rounds with a remote draft or target overlap, or the target does not wait. `reconnect_seconds`: how long requests
    are retried while no target answers. `queue`: requests that may wait. `step_seconds`: time limit of a device step;
    None: derived from measured steps, 0: no limit. `defaults`: for fields that Generate requests leave out;
    `generation_config` "auto": those of the model's file come next. `command`: this process's command line, used to
    start other ranks. `prefixes`: who shares those of prompts and answers.
    `kv_cache_mb`: MiB that the KV slots of all models share; None: each slot has memory for its full length.
    `own_length`: sequences are as long as the models and memory allow, not as `models.shape` says, and with `own_slots`
    there may be more slots than there. `prefill`: where a target has prompts computed; None: here. `receipts`: the
    keys with which receipts are signed.
    """

    serve: ServeConfig
    models: ModelConfig
    target_address: str | None
    draft_address: str | None
    draft_seconds: float
    lease_seconds: float
    profile: bool
    pipeline: Pipeline
    observability: ObservabilityConfig
    reconnect_seconds: float
    queue: int
    credentials: Credentials
    step_seconds: float | None
    defaults: RequestDefaults
    command: tuple[str, ...]
    prefixes: PrefixSharing
    generation_config: str
    prefill: PrefillConfig | None
    receipts: ReceiptConfig
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
        if not self.draft_seconds > 0:
            raise ValueError(f"draft_seconds: {self.draft_seconds} is not above 0")
