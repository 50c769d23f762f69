"""That the manifests' pieces fit: ports, probes, mounts, claims, who is where, who may call whom."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tandem.services.shutdown import STOP_SECONDS
from tests.deploy.manifests import OVERLAYS, ROOT, flags, objects, of_kind, pods

COMPARED = ("same-node", "apart")
CORES_PER_DEVICE = 4  # logical cores of a Trainium2 device at LNC 2


@pytest.mark.parametrize(
    ("folder", "name"), [(f"overlays/{o}", name) for o in OVERLAYS for name in of_kind(f"overlays/{o}", "StatefulSet")]
)
class TestAServer:
    def container(self, folder: str, name: str) -> dict[str, Any]:
        (container,) = pods(folder)[name]["spec"]["containers"]
        return container

    def test_is_probed_by_its_services_name_where_it_answers_probes(self, folder: str, name: str) -> None:
        container = self.container(folder, name)
        protos = "".join(path.read_text() for path in (ROOT / "proto" / "tandem" / "v1").glob("*.proto"))
        served = {"target": "TargetVerifier", "draft_worker": "DraftWorker", "fused_target": "FusedSpeculativeServer"}
        service = served[flags(container)["role"]]
        assert f"service {service} {{" in protos
        for probe in ("startupProbe", "readinessProbe"):
            assert container[probe]["grpc"]["service"] == f"tandem.v1.{service}"
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert container[probe]["grpc"]["port"] == int(flags(container)["health_port"])

    def test_listens_on_the_ports_that_it_names(self, folder: str, name: str) -> None:
        container = self.container(folder, name)
        ports = {port["name"]: str(port["containerPort"]) for port in container["ports"]}
        asked = flags(container)
        assert ports == {"grpc": asked["port"], "health": asked["health_port"], "metrics": asked["metrics_port"]}
        service = of_kind(folder, "Service")[name]["spec"]
        assert service["clusterIP"] == "None"
        assert service["selector"].items() <= pods(folder)[name]["metadata"]["labels"].items()
        assert str(service["ports"][0]["port"]) == asked["port"]

    def test_has_longer_to_stop_than_it_drains(self, folder: str, name: str) -> None:
        drain = float(flags(self.container(folder, name))["drain_seconds"])
        assert drain < 30, "torchrun kills its processes after 30 s"
        assert pods(folder)[name]["spec"]["terminationGracePeriodSeconds"] >= 30 + drain

    def test_is_not_restarted_by_its_liveness_probe_while_it_drains(self, folder: str, name: str) -> None:
        container = self.container(folder, name)
        probe, drain = container["livenessProbe"], float(flags(container)["drain_seconds"])
        assert probe["periodSeconds"] * probe["failureThreshold"] > drain + STOP_SECONDS

    def test_shows_a_certificate_and_asks_for_tokens(self, folder: str, name: str) -> None:
        asked = flags(self.container(folder, name))
        assert {"tls_cert", "tls_key", "accept_tokens"} <= set(asked)
        assert "insecure" not in asked

    def test_is_not_evicted_all_at_once(self, folder: str, name: str) -> None:
        budget = of_kind(folder, "PodDisruptionBudget")[name]["spec"]
        assert budget["selector"]["matchLabels"].items() <= pods(folder)[name]["metadata"]["labels"].items()
        assert budget["maxUnavailable"] == 1


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_what_a_pod_mounts_and_claims_is_there(overlay: str) -> None:
    folder = f"overlays/{overlay}"
    for name, pod in pods(folder).items():
        spec = pod["spec"]
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        for claim in spec.get("resourceClaims", ()):
            assert claim["resourceClaimTemplateName"] in of_kind(folder, "ResourceClaimTemplate")
        for volume in volumes.values():
            if "persistentVolumeClaim" in volume:
                assert volume["persistentVolumeClaim"]["claimName"] in of_kind(folder, "PersistentVolumeClaim")
            if "secret" in volume:
                assert volume["secret"]["secretName"] in ("tandem-tls", "tandem-tokens")  # yours to make: README.md
        for container in (*spec.get("initContainers", ()), *spec["containers"]):
            mounts = {mount["mountPath"] for mount in container.get("volumeMounts", ())}
            assert {mount["name"] for mount in container["volumeMounts"]} <= set(volumes)
            files = [word.partition("=")[2] for word in container.get("args", ()) if "=/" in word]
            assert all(
                f"/{file.split('/')[1]}" in mounts or file in mounts or file == "/cache/compiled" for file in files
            )
            for source in container.get("envFrom", ()):
                assert source["configMapRef"]["name"] in of_kind(folder, "ConfigMap")
            claimed = {claim["name"] for claim in container.get("resources", {}).get("claims", ())}
            assert claimed <= {claim["name"] for claim in spec.get("resourceClaims", ())}, name


def devices(folder: str, name: str) -> int:
    return int(request_of(folder, name)["count"])


def request_of(folder: str, name: str) -> dict[str, Any]:
    (request,) = of_kind(folder, "ResourceClaimTemplate")[name]["spec"]["spec"]["devices"]["requests"]
    return dict(request["exactly"])


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_claims_are_connected_devices_with_two_physical_cores_to_a_logical_one(overlay: str) -> None:
    for template in of_kind(f"overlays/{overlay}", "ResourceClaimTemplate").values():
        claim = template["spec"]["spec"]["devices"]
        count = claim["requests"][0]["exactly"]["count"]
        group = re.fullmatch(r"resource\.aws\.com/devicegroup(1|4|8|16)_id", claim["constraints"][0]["matchAttribute"])
        assert group and int(group[1]) >= count
        (config,) = claim["config"]
        assert config["opaque"]["parameters"] == {
            "apiVersion": "neuron.aws.com/v1",
            "kind": "NeuronConfig",
            "logicalNeuronCore": 2,
        }
        named = {name for part in (claim["constraints"][0], config) for name in part["requests"]}
        assert named == {claim["requests"][0]["name"]}


@pytest.mark.parametrize("overlay", COMPARED)
def test_fused_gets_as_many_devices_as_target_and_draft_and_uses_them(overlay: str) -> None:
    folder = f"overlays/{overlay}"
    assert devices(folder, "fused") == devices(folder, "target") + devices(folder, "draft")
    models = of_kind(folder, "ConfigMap")["models"]["data"]
    assert int(models["TARGET_TP"]) == devices(folder, "target") * CORES_PER_DEVICE


@pytest.mark.parametrize(
    "overlay", [name for name in OVERLAYS if "fused" in of_kind(f"overlays/{name}", "StatefulSet")]
)
def test_a_fused_server_uses_every_core_of_its_devices(overlay: str) -> None:
    models = of_kind(f"overlays/{overlay}", "ConfigMap")["models"]["data"]
    assert int(models["FUSED_TP"]) == devices(f"overlays/{overlay}", "fused") * CORES_PER_DEVICE


def test_the_widest_that_is_compiled_fits_its_claim() -> None:
    models = of_kind("overlays/compile", "ConfigMap")["models"]["data"]
    widest = max(int(models["TARGET_TP"]), int(models["FUSED_TP"]))
    assert devices("overlays/compile", "compile") * CORES_PER_DEVICE >= widest


@pytest.mark.parametrize("part", ["target", "draft", "fused"])
def test_what_is_compiled_is_what_is_served(part: str) -> None:
    """A flag that differs means graphs that nobody finds."""
    shape = ("target_model", "device", "dtype", "sequence_length", "batch", "tp_degree", "cores", "compiled_dir")
    spoken = ("speculation_length", "max_speculation_length")
    (served,) = pods("overlays/same-node")[part]["spec"]["containers"]
    steps = {each["name"]: each for each in pods("overlays/compile")["compile"]["spec"]["initContainers"]}
    compiled, wanted = flags(steps[part]), flags(served)
    assert compiled["compile_for"] == part
    differ = [f for f in (*shape, *spoken) if compiled.get(f) != wanted.get(f)]
    assert differ == []


def terms(overlay: str, name: str, kind: str) -> set[str]:
    """Which services' pods `name` must be on one node with, or may not be."""
    affinity = pods(f"overlays/{overlay}")[name]["spec"].get("affinity", {})
    found = affinity.get(kind, {}).get("requiredDuringSchedulingIgnoredDuringExecution", ())
    assert all(term["topologyKey"] == "kubernetes.io/hostname" for term in found)
    selectors = [term["labelSelector"] for term in found]
    listed = {value for s in selectors for each in s.get("matchExpressions", ()) for value in each["values"]}
    return listed | {value for s in selectors for value in s.get("matchLabels", {}).values()}


def test_the_round_trip_is_what_the_two_overlays_differ_in() -> None:
    for overlay in COMPARED:
        assert terms(overlay, "fused", "podAffinity") == {"target"}
        assert terms(overlay, "comparison", "podAffinity") == {"draft"}  # the draft is at the client
    assert terms("same-node", "draft", "podAffinity") == {"target"}
    assert terms("apart", "draft", "podAntiAffinity") == {"target", "fused"}
    differ = [
        a["metadata"]["name"] for a, b in zip(*map(objects, (f"overlays/{o}" for o in COMPARED)), strict=True) if a != b
    ]
    assert differ == ["draft", "comparison"]


@pytest.mark.parametrize("overlay", COMPARED)
def test_only_pods_that_call_others_are_let_through(overlay: str) -> None:
    folder = f"overlays/{overlay}"
    policies = of_kind(folder, "NetworkPolicy")
    assert policies["nobody"]["spec"] == {"podSelector": {}, "policyTypes": ["Ingress"]}
    (rule,) = policies["callers"]["spec"]["ingress"]
    (peer,) = rule["from"]
    label = peer["podSelector"]["matchLabels"]
    calling = {name for name, pod in pods(folder).items() if label.items() <= pod["metadata"]["labels"].items()}
    assert calling == {"draft", "comparison"}
    (served,) = policies["callers"]["spec"]["podSelector"]["matchExpressions"]
    assert set(served["values"]) == set(of_kind(folder, "StatefulSet"))


def test_pods_run_where_the_node_pool_has_nodes() -> None:
    template = of_kind("cluster", "NodePool")["trn2"]["spec"]["template"]
    (taint,) = template["spec"]["taints"]
    for overlay in OVERLAYS:
        for pod in pods(f"overlays/{overlay}").values():
            assert pod["spec"].get("nodeSelector", {}).items() <= template["metadata"]["labels"].items()
            assert any(each["key"] == taint["key"] for each in pod["spec"]["tolerations"])
