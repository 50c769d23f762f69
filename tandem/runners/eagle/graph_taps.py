"""Takes a target's hidden states inside a graph.

`Taps` of features.py keeps what it catches until a step has ended, which a graph cannot. Here the hidden states go to
the cache that a step makes for itself (`GatheredSlots`), and the step writes them to the features in place, as it
writes keys and values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from tandem.runners.eagle.hidden_states import decoder_layers


def tap(module: Any, layers: Sequence[int]) -> None:
    """Makes every run of a transformers module leave the hidden states after so many `layers` in its cache's `caught`.

    Changes nothing that the module computes. Raises ValueError for a module whose layers are not known.
    """
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
