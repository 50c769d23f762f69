"""Where the seconds until a server is ready went."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tandem.runners.loading import Execution
from tandem.runners.startup import Startup
from tandem.runners.torch.platforms import compile_order, platform_of


def test_stages_of_one_name_add_up_and_what_none_covers_is_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.runners.startup.time", SimpleNamespace(monotonic=lambda: 110.0))
    startup = Startup(100.0)
    startup.add("loading", 2.0)
    startup.add("loading", 3.0)
    with startup.stage("listening"):
        pass
    assert startup.seconds["loading"] == 5.0
    assert startup.line() == "loading 5.0 s, other 5.0 s"
    assert startup.total() == 10


def test_a_stage_that_fails_is_counted_too() -> None:
    startup = Startup()
    with pytest.raises(ValueError), startup.stage("loading"):
        raise ValueError
    assert "loading" in startup.seconds


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
