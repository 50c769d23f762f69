"""Falls back on prompt lookup for targets without a head's features."""

from __future__ import annotations

import logging

from tandem.engine.generators import Drafting
from tandem.runners.capabilities import FeaturesIn
from tandem.speculation.features import FeatureSpec
from tandem.speculation.types import ModelInfo

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
    return drafting, FeatureSpec(head.layers, target.feature_size, drafting.choice.feature_format)


def _check_fits(drafting: Drafting, head: FeaturesIn, target: ModelInfo, address: str) -> None:
    where = f"the target at {address}"
    if lacking := [str(layer) for layer in head.layers if layer not in target.feature_layers]:
        known, wanted = ", ".join(map(str, target.feature_layers)), ",".join(map(str, head.layers))
        raise ValueError(
            f"draft: {drafting.name} reads layer {', '.join(lacking)}, and {where} hands out {known};"
            f" start it with --hand_out_features {wanted}"
        )
    if head.target_hidden_size != target.feature_size:
        raise ValueError(
            f"draft: {drafting.name} was made for a hidden size of {head.target_hidden_size}, that of {where} is"
            f" {target.feature_size}"
        )
    if drafting.vocab_size != target.vocab_size:
        raise ValueError(
            f"draft: {drafting.name} was made for a vocabulary of {drafting.vocab_size}, that of {where} is"
            f" {target.vocab_size}"
        )
    if head.weights_revision_read not in ("", target.weights_revision):
        raise ValueError(
            f"draft: {drafting.name} got its embedding from weights of revision {head.weights_revision_read}, and"
            f" {where} has {target.weights_revision}; name the same weights with --target_model"
        )
