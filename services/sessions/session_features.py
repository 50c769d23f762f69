"""Grants hidden-state features to sessions and reads those of prompts."""

from __future__ import annotations

from tandem.engine.engine import Engine
from tandem.engine.feature_output import OPENING_BYTES
from tandem.engine.sequences import TargetSequence
from tandem.rpc.wire_sessions import feature_format_from_wire
from tandem.speculation.features import FeatureSpec
from tandem.speculation.types import InvalidField
from tandem.v1 import target_verifier_pb2 as pb

MOST_LAYERS = 8


def features_granted(engine: Engine, request: pb.OpenSessionRequest) -> FeatureSpec | None:
    """Returns the features in a session's verdicts, or None. Raises InvalidField."""
    if len(request.features.layers) > MOST_LAYERS:
        raise InvalidField("features.layers", f"{len(request.features.layers)} exceed {MOST_LAYERS}")
    if engine.features is None or not request.HasField("features"):
        return None
    return engine.features.spec(request.features.layers, feature_format_from_wire(request.features.format))


async def opening_features(sequence: TargetSequence, spec: FeatureSpec, request: pb.OpenSessionRequest) -> pb.Features:
    """Returns the prefix's features from the requested position, as many as fit in a message."""
    end = len(request.prefix) - 1
    start = min(max(request.features.start, end - OPENING_BYTES // spec.position_bytes), end)
    return pb.Features(start=start, values=await sequence.features(spec, start, end))
