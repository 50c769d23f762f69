"""Which ways of running a model exclude which capabilities, and why: source of errors and docs/running.md."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from tandem.runners.capabilities import Capabilities, No, Trait
from tandem.runners.protocol import Runner

ASKED: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "pages": ("copies no keys and values out of its slots", "kept prefixes, --prefill, role prefill"),
        "adapters": ("takes no LoRA adapters", "LoRA adapters: --adapters, --draft_adapters"),
        "memory_on_demand": ("reserves its KV slots whole", "--kv_cache_mb"),
        "features_out": ("hands out no hidden states", "--hand_out_features, an EAGLE head beside the target"),
        "logits": ("keeps its logits on the device", "temperature, log-probabilities, whatever changes logits"),
        "structures": ("masks no logits", "structured output"),
        "copied_drafts": ("verifies only its own drafts", "--draft hybrid"),
        "proposals": ("does not draft for targets that call it", "draft_worker without --target_host"),
    }
)  # by field of Capabilities: text of errors, and how users ask for it

EXCLUDED: Mapping[Trait, Mapping[str, str]] = MappingProxyType(
    {
        Trait.SHARED: {
            "pages": "each process holds a share of every page",
            "adapters": "processes share the model",
            "memory_on_demand": "processes share the model",
            "features_out": "several processes share the model; leave --tp_degree out, or use --draft model",
            "structures": "each process would need a matcher of its own",
        },
        Trait.HEAD: {
            "pages": "an EAGLE head makes its keys again, from the features in its target's pages",
            "adapters": "lookup drafts for requests that have one",
            "proposals": (
                "an EAGLE head reads its target's features, and targets that ask for drafts (Propose)"
                " send none; give the worker its --target_host, or another draft"
            ),
        },
        Trait.GRAPHS: {
            "pages": "no graph copies pages",
            "adapters": "compiled graphs have none: use --compile native or off",
            "memory_on_demand": "compiled graphs need whole slots",
        },
        Trait.WHOLE_SLOTS: {"memory_on_demand": "module code needs whole slots there"},
        Trait.INEXACT: {"pages": "its steps were not seen to give the same bits in all their shapes"},
        Trait.NXD_INFERENCE: {
            "pages": "NxD Inference keeps them to itself",
            "memory_on_demand": "NxD Inference allocates them when it loads",
            "features_out": "NxD Inference keeps them to itself, and runs a head in its target's graph: --eagle",
        },
        Trait.TOKENS_ONLY: {
            "logits": "tokens are chosen there, greedily only",
            "structures": "they stay on the device",
        },
        Trait.ONE_GRAPH: {"copied_drafts": "it drafts and verifies in one; use --draft model"},
    }
)  # by trait and field of Capabilities: the reason


def able(runner: Runner) -> Capabilities:
    """A warm runner's capabilities, without excluded ones."""
    has = runner.capabilities
    traits = [trait for trait in reversed(Trait) if trait in has.traits]  # of several reasons, the first one stays
    found = {field: No(why) for trait in traits for field, why in EXCLUDED[trait].items()}
    return replace(has, **found)  # type: ignore[arg-type]


def refusal(flag: str, model: str, field: str, why: str) -> ValueError:
    """The error for `flag`, which needs a capability that the model lacks."""
    return ValueError(f"{flag}: {sentence(model, field, why)}")


def excluded(flag: str, model: str, trait: Trait, field: str) -> ValueError:
    """The error for `flag`, before the model is loaded."""
    return refusal(flag, model, field, EXCLUDED[trait][field])


def sentence(model: str, field: str, why: str) -> str:
    """Which capability the model lacks, and why."""
    return f"{model} {ASKED[field][0]}: {why}"
