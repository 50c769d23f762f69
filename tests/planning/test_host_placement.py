"""Where the servers of a comparison run on one host."""

from __future__ import annotations

import pytest

from tandem.host.cores import parse_cores
from tandem.host.devices import Devices
from tandem.workshops.planning.host_placement import (
    CoreGroup,
    HostPlacement,
    place_on_cpus,
    place_on_gpus,
    place_on_neuron,
)
from tandem.workshops.planning.plan import PlanConfig
from tests.planning.support import model

TRN1 = Devices(count=1, instance="trn1.2xlarge", family="trn1", cores=2, lnc=1)
TRN2 = Devices(count=16, instance="trn2.48xlarge", family="trn2", cores=64, lnc=2)
ONE_CHIP = Devices(count=1, instance="trn2.48xlarge", family="trn2", cores=4, lnc=2)  # a claim on one device


def config(target: str, draft: str | None, **settings: object) -> PlanConfig:
    return PlanConfig("found", model(target), draft and model(draft), **settings)  # type: ignore[arg-type]


def test_cpus_are_divided_and_all_used() -> None:
    placement = place_on_cpus((0, 1, 2, 3), None, 1)
    assert placement == HostPlacement(CoreGroup("0-3"), CoreGroup("0-2"), CoreGroup("3"))
    assert place_on_cpus((0, 1), None, 2) == HostPlacement(CoreGroup("0,1", 2), CoreGroup("0"), CoreGroup("1"))
    assert place_on_cpus(tuple(range(8)), (6, 7), 4).target == CoreGroup("0-5", 2)


def test_gpus_go_one_to_a_process() -> None:
    assert place_on_gpus((0, 1), None, 2) == HostPlacement(CoreGroup("0,1", 2), CoreGroup("0"), CoreGroup("1"))
    with pytest.raises(ValueError, match="cores: tp_degree 1 uses as many, and 2 are named"):
        place_on_gpus((0, 1), None, 1)


def test_the_first_seeds_pair_fits_its_instance_fused_and_apart_with_the_draft_on_the_host() -> None:
    """The target needs both cores of a trn1.2xlarge, so the seed's draft ran on another machine."""
    pair = config("Llama-3.1-8B", "Llama-3.2-1B", backend="nxdi", batch=2, length=128, drafts=4, degree=2)
    with pytest.raises(ValueError, match="cores: distributed does not fit on 2 cores; --role plan says what does"):
        place_on_neuron(pair, TRN1, None, None)
    both = CoreGroup("0,1", 2)
    assert place_on_neuron(pair, TRN1, None, None, apart=False) == HostPlacement(both, both, None)


def test_the_plan_says_how_wide_each_server_is() -> None:
    pair = config("Llama-3.1-8B", "Llama-3.2-1B", batch=4, length=4096, drafts=4)
    placed = place_on_neuron(pair, ONE_CHIP, None, None)
    assert placed.draft is not None
    sets = [set(parse_cores(group.cores)) for group in (placed.whole, placed.target, placed.draft)]
    assert sets[1] | sets[2] <= sets[0] and not sets[1] & sets[2]
    assert [len(cores) for cores in sets] == [placed.whole.degree, placed.target.degree, placed.draft.degree]
    named = place_on_neuron(pair, TRN2, parse_cores("8-15"), parse_cores("12-13"))
    assert named == HostPlacement(CoreGroup("8-15", 8), CoreGroup("8-11", 4), CoreGroup("12,13", 2))


def test_lookup_takes_no_core_of_a_device() -> None:
    placed = place_on_neuron(config("Llama-3.1-8B", None), TRN2, parse_cores("0-3"), None)
    assert placed.draft is None and placed.target == placed.whole == CoreGroup("0-3", 4)
    assert "on the host's CPU" in str(placed)


def test_what_cannot_be_placed_is_one_line() -> None:
    pair = config("Llama-3.1-8B", "Llama-3.2-1B", batch=4, length=4096)
    with pytest.raises(ValueError, match=r"device: no Neuron device is found here; compare servers .* --connect"):
        place_on_neuron(pair, Devices(), None, None)
    with pytest.raises(ValueError, match=r"cores: 128 are more than the 64 that a trn2.48xlarge has at LNC 2"):
        place_on_neuron(pair, TRN2, tuple(range(128)), None)
    with pytest.raises(ValueError, match="cores: distributed does not fit on 1 cores"):
        place_on_neuron(pair, TRN2, (0,), None)
    with pytest.raises(ValueError, match="draft-cores: 9 must be among --cores 0-7, or fused decoding would have"):
        place_on_cpus(tuple(range(8)), (9,), 1)
    with pytest.raises(ValueError, match="cores: a target and a draft apart need at least two"):
        place_on_cpus((0,), None, 1)
    with pytest.raises(ValueError, match="cores: 3 of them cannot be divided among 2 ranks"):
        place_on_cpus((0, 1, 2), None, 2)
