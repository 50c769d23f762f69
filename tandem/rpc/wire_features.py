"""Converts what features are asked for, and those handed out, to protobuf messages and back."""

from __future__ import annotations

from tandem.rpc import wire_checks as check
from tandem.speculation.features import FeatureFormat, FeatureInbox
from tandem.v1 import generation_pb2 as pb
from tandem.v1 import target_verifier_pb2 as verifier_pb

_FORMATS = {
    FeatureFormat.BFLOAT16: pb.FEATURE_FORMAT_BFLOAT16,
    FeatureFormat.INT8: pb.FEATURE_FORMAT_INT8,
}


def feature_format_from_wire(value: int) -> FeatureFormat:
    """Converts a number format; unspecified means bfloat16. Raises InvalidField."""
    if value == pb.FEATURE_FORMAT_UNSPECIFIED:
        return FeatureFormat.BFLOAT16
    return check.member("features.format", value, _FORMATS, "number format")


def feature_request(inbox: FeatureInbox | None, prefix_length: int) -> verifier_pb.FeatureRequest | None:
    """What an opening asks for, so that `inbox` has the features of the prefix; None without an inbox."""
    if inbox is None:
        return None
    spec = inbox.spec
    return verifier_pb.FeatureRequest(
        layers=spec.layers, format=_FORMATS[spec.format], start=inbox.wanted(prefix_length)
    )
