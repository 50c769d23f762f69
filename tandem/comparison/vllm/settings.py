"""Which architectures vLLM has, by what of vLLM each is, and what of a comparison it cannot be asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tandem.comparison.measuring.architectures import (
    AUTOREGRESSIVE,
    FUSED,
    LOOKUP,
    NEVER_WAITING,
    OPENAI,
    REMOTE_DRAFT,
    Architecture,
)
from tandem.speculation.types import Rule

if TYPE_CHECKING:
    from tandem.comparison.measuring.config import ComparisonConfig

VLLM = "vllm"
ENGINES = ("tandem", VLLM)
VARIABLE = "TANDEM_VLLM_PYTHON"
WRITTEN_FOR = "0.32.0"
"""The version whose options and counters these are."""
SHORTEST_NGRAM, LONGEST_NGRAM = 1, 3
FORMS: Mapping[str, str] = {REMOTE_DRAFT.name: "waiting", NEVER_WAITING.name: "never_waiting"}
"""The form of our drafter, for each architecture whose drafts come from a DraftWorker."""
SERVED: Mapping[str, str] = {
    AUTOREGRESSIVE.name: "plain",
    LOOKUP.name: "its own n-gram",
    FUSED.name: "its own draft_model",
    REMOTE_DRAFT.name: "tandem.vllm.RemoteDrafter, waiting",
    NEVER_WAITING.name: "tandem.vllm.RemoteDrafter, never waiting",
}
"""What of vLLM each architecture is."""


def of_vllm(architecture: Architecture) -> Architecture:
    """Returns an architecture as a server of the OpenAI API: nothing is known of bytes between draft and target."""
    return Architecture(architecture.name, OPENAI.service)


def speculation(architecture: str, k: int, draft: str | None) -> dict[str, Any] | None:
    """Returns vLLM's --speculative-config for an architecture; None for plain decoding."""
    if architecture == AUTOREGRESSIVE.name:
        return None
    if architecture == LOOKUP.name:
        least, most = SHORTEST_NGRAM, LONGEST_NGRAM
        return {
            "method": "ngram",
            "prompt_lookup_min": least,
            "prompt_lookup_max": most,
            "num_speculative_tokens": k,
        }
    if architecture == FUSED.name:
        return {"method": "draft_model", "model": draft, "num_speculative_tokens": k}
    return {"method": "custom_class", "model": "tandem.vllm.RemoteDrafter", "num_speculative_tokens": k}


def started_here(config: ComparisonConfig) -> tuple[str, ...]:
    """Returns the architectures whose servers are started, and do not run already."""
    return tuple(name for name in config.architectures if name not in config.connect)


def check(config: ComparisonConfig) -> None:
    """Raises ValueError, in one line that names the flag, for what is not measured with vLLM."""
    for name in (*config.architectures, *config.connect):
        if name not in SERVED and name != OPENAI.name:
            raise ValueError(f"architectures: vLLM has no {name}; with --engine vllm there are {', '.join(SERVED)}")
    for name, address in config.connect.items():
        if "://" not in address:
            raise ValueError(f"connect: {name}={address} is no server of vLLM, which has a URL: http://HOST:PORT")
    started = started_here(config)
    if started and config.model is None:
        raise ValueError("model: --engine vllm needs the folder of a model")
    if config.draft_model is None and FUSED.name in started:
        raise ValueError("draft-model: vLLM's draft_model (fused) needs the folder of one")
    if not config.speculation_length:
        raise ValueError("speculation-length: vLLM's is a fixed number of at least 1; leave out the others for plain")
    for flag, given in _not_of_vllm(config).items():
        if given:
            raise ValueError(f"{flag}: is not for --engine vllm")


def _not_of_vllm(config: ComparisonConfig) -> dict[str, bool]:
    """Returns which settings were given that a comparison of vLLM's servers does not have."""
    return {
        "rule": config.rules != (Rule.AGREEMENT,),
        "pipeline": config.pipeline != "off",
        "cores": config.placement is not None,
        "draft-device": config.draft_device is not None,
        "tp-degree": config.tp_degree != 1,
        "rehearse": config.rehearse is not None,
        "adapters": bool(config.adapters or config.adapter),
        "draft-adapters": config.draft_adapters is not None,
        "head": config.head is not None or config.drafts_with_head,
        "capacity": config.capacity_ms is not None,
        "mean-input-tokens": config.mean_input_tokens is not None,
        "backend": config.backend not in ("torch", "toy"),
    }
