"""Claims for devices against what drivers publish of a node: selectors choose, and groups have what is asked for.

The slice has the form that AWS's Neuron driver and DraNet publish (16 Trainium2 devices and 16 EFA devices in groups of
1, 4, 8 and 16), written by us. Expressions of our claims have one form, which is evaluated here; if a CEL library is
installed (pip install common-expression-language), it must say the same.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest

from tests.deploy.manifests import OVERLAYS, of_kind

NEURON, EFA = "neuron.aws.com", "efa.networking.k8s.aws"
GROUPS = (1, 4, 8, 16)
FORM = re.compile(r"device\.attributes\['([\w.]+)'\]\.(\w+) == '([^']*)'")
Claim = dict[str, Any]
Device = dict[str, Any]


def devices(instance: str) -> list[Device]:
    """What a node publishes: attributes by domain and name, and the class that a device is of."""
    made = []
    for number in range(16):
        groups = {f"devicegroup{size}_id": f"{instance}-{size}-{number // size}" for size in GROUPS}
        neuron = {"instanceType": instance, "deviceId": number, "neuronVersion": "v3"}
        made.append({"driver": NEURON, "attributes": {NEURON: neuron, "resource.aws.com": groups}})
        network = {"rdma": True, "pciVendor": "Amazon.com, Inc.", "numaNode": number // 8}
        made.append({"driver": EFA, "attributes": {"dra.net": network, "resource.aws.com": groups}})
    return made


def chosen(expression: str, device: Device) -> bool:
    """The expression's value for the device; an attribute that is not there matches nothing, as in the scheduler."""
    match = FORM.fullmatch(expression)
    assert match is not None, f"another form of expression: {expression}"
    domain, name, value = match.groups()
    return bool(device["attributes"].get(domain, {}).get(name) == value)


def allocated(claim: Claim, node: list[Device]) -> list[Device] | None:
    """The first group of the node that has all that the claim asks for, or None."""
    (constraint,) = claim["constraints"]
    domain, name = constraint["matchAttribute"].split("/")
    for group in dict.fromkeys(device["attributes"][domain][name] for device in node):
        inside = [device for device in node if device["attributes"][domain][name] == group]
        taken: list[Device] = []
        for request in claim["requests"]:
            exactly = request["exactly"]
            asked = [one["cel"]["expression"] for one in exactly.get("selectors", ())]
            fits = [d for d in inside if d["driver"] == exactly["deviceClassName"] and all(chosen(e, d) for e in asked)]
            taken += fits[: exactly["count"]]
        if len(taken) == sum(request["exactly"]["count"] for request in claim["requests"]):
            return taken
    return None


def claims() -> list[tuple[str, Claim]]:
    return [
        (f"{overlay}/{name}", template["spec"]["spec"]["devices"])
        for overlay in OVERLAYS
        for name, template in of_kind(f"overlays/{overlay}", "ResourceClaimTemplate").items()
    ]


@pytest.mark.parametrize(("name", "claim"), claims())
def test_a_claim_is_met_by_connected_devices_of_its_instance_and_by_no_other(name: str, claim: Claim) -> None:
    taken = allocated(claim, devices("trn2.48xlarge"))
    asked = {each["exactly"]["deviceClassName"]: each["exactly"]["count"] for each in claim["requests"]}
    assert taken is not None and Counter(device["driver"] for device in taken) == asked
    assert set(asked) == {NEURON}
    assert allocated(claim, devices("trn1.32xlarge")) is None
    assert allocated(claim, [d for d in devices("trn2.48xlarge") if d["driver"] == EFA]) is None


def test_what_a_claim_asks_wrongly_is_not_met() -> None:
    """The check itself: more than a group has, another attribute, another class."""
    wanted = {"deviceClassName": NEURON, "count": 4, "selectors": []}
    attribute = "resource.aws.com/devicegroup{}_id".format

    def met(group: int, **other: object) -> bool:
        claim = {"requests": [{"exactly": wanted | other}], "constraints": [{"matchAttribute": attribute(group)}]}
        return allocated(claim, devices("trn2.48xlarge")) is not None

    assert met(4) and met(8) and not met(1) and not met(4, count=5)
    typo = {"cel": {"expression": "device.attributes['neuron.aws.com'].instance == 'trn2.48xlarge'"}}
    assert not met(4, selectors=[typo]) and not met(4, deviceClassName="gpu.nvidia.com")


def test_a_cel_library_says_the_same() -> None:
    cel = pytest.importorskip("cel", reason="no CEL library is installed: pip install common-expression-language")
    expressions = {
        selector["cel"]["expression"]
        for _, claim in claims()
        for request in claim["requests"]
        for selector in request["exactly"].get("selectors", ())
    }
    assert expressions
    for device in (*devices("trn2.48xlarge"), *devices("trn1.32xlarge")):
        for expression in expressions:
            try:
                said = cel.evaluate(expression, {"device": device})
            except KeyError:  # no such attribute: the scheduler passes the device over
                said = False
            assert said is chosen(expression, device)
