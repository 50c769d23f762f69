"""Hands out a target's features with its verdicts, for remote heads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tandem.checkpoints.head_config import default_layers
from tandem.engine.compatibility import able, refusal
from tandem.runners.capabilities import FeatureRow, HandedOut, No
from tandem.runners.protocol import RowFailed, Runner, VerifyRow
from tandem.speculation.features import FeatureSpec
from tandem.speculation.types import InvalidField, Verdict

OPENING_BYTES = 2 << 20  # features in the reply to an opening, at most; gRPC's limit for a message is 4 MiB

Verify = Callable[[Sequence[VerifyRow]], list[Verdict | RowFailed]]


@dataclass(frozen=True, slots=True)
class HandedFeatures:
    """A target's features after `layers`. Methods with rows are steps."""

    layers: tuple[int, ...]
    hidden_size: int
    source: HandedOut

    def spec(self, layers: Sequence[int]) -> FeatureSpec:
        """A session's grant. Raises InvalidField for a layer that is not handed out."""
        for layer in layers:
            if layer not in self.layers:
                known = ", ".join(map(str, self.layers))
                raise InvalidField("features.layers", f"{layer} is not handed out here: {known} are")
        return FeatureSpec(tuple(layers), self.hidden_size)

    def verify(self, verify: Verify, rows: Sequence[VerifyRow]) -> list[Verdict | RowFailed]:
        """Verifies, with features in the verdicts of rows that request them."""
        verdicts = verify(rows)
        asked = [
            (verdict, FeatureRow(row.slot, row.position, verdict.accepted + 1, row.request.features))
            for row, verdict in zip(rows, verdicts, strict=True)
            if isinstance(verdict, Verdict) and row.request.features is not None
        ]
        for (verdict, _), found in zip(asked, self.read([row for _, row in asked]), strict=True):
            verdict.features = found
        return verdicts

    def read(self, rows: Sequence[FeatureRow]) -> list[bytes]:
        chosen = []
        for row, values in zip(rows, self.source.read(rows) if rows else (), strict=True):
            by_layer = values.reshape(row.count, len(self.layers), self.hidden_size)
            chosen.append(row.spec.encode(by_layer[:, [self.layers.index(layer) for layer in row.spec.layers]]))
        return chosen


def hand_out(runner: Runner, layers: tuple[int, ...]) -> HandedFeatures:
    """Makes a target's steps hand out features; on the device thread. Raises ValueError, one line."""
    out = able(runner).features_out
    if isinstance(out, No):
        raise refusal("hand_out_features", runner.identity.model_name, "features_out", out)
    chosen = layers or default_layers(out.layer_count)
    if not all(1 <= layer <= out.layer_count for layer in chosen):
        given = ", ".join(map(str, chosen))
        raise ValueError(f"hand_out_features: layers {given} are not all within 1 to {out.layer_count}")
    try:
        return HandedFeatures(chosen, out.hidden_size, out.hand_out(chosen))
    except ValueError as error:
        raise ValueError(f"hand_out_features: not with these steps, use --compile native or off: {error}") from None
