"""Taps a target's hidden states inside a graph: via the step's `GatheredSlots`, written in place to the features."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from tandem.runners.eagle.hidden_states import decoder_layers


def tap(module: Any, layers: Sequence[int]) -> None:
    """Runs of the module leave hidden states after `layers` in its cache's `caught`. Raises ValueError."""
    decoders = decoder_layers(module)
    for layer in sorted(set(layers)):
        if layer < len(decoders):
            decoders[layer].register_forward_pre_hook(_before(layer), with_kwargs=True)
        else:
            decoders[-1].register_forward_hook(_after(layer), with_kwargs=True)


def _before(layer: int) -> Any:
    def catch(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        _keep(kwargs, layer, args[0] if args else kwargs["hidden_states"])

    return catch


def _after(layer: int) -> Any:
    def catch(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        _keep(kwargs, layer, output[0] if isinstance(output, tuple) else output)

    return catch


def _keep(kwargs: dict[str, Any], layer: int, hidden: Any) -> None:
    kwargs["past_key_values"].caught[layer] = hidden
