"""Where the seconds until a server is ready went."""

from __future__ import annotations

import pytest

from tandem.runners.loading import Execution
from tandem.runners.torch.platforms import compile_order, platform_of


@pytest.mark.parametrize(
    ("name", "device", "chosen"),
    [
        ("auto", "cuda", ("inductor",)),
        ("auto", "cpu", ("native", "off")),
        ("off", "cuda", ("off",)),
        ("auto", "neuron", ("neuron",)),
    ],
)
def test_what_runs_the_steps_is_chosen_by_device(name: str, device: str, chosen: tuple[str, ...]) -> None:
    assert compile_order(name, platform_of(device)) == chosen


def test_an_unknown_way_to_compile_is_refused() -> None:
    with pytest.raises(ValueError, match="compile: 'fast' is not one of auto, native, inductor, neuron, off"):
        Execution(compile="fast")
