"""The manifests of deploy/k8s: valid, complete, and with flags that our programs know. No cluster is needed."""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

import compare_architectures
import main
from tests.deploy.karpenter import KINDS
from tests.deploy.kustomize import build, containers, pod_of

ROOT = Path(__file__).resolve().parents[2]
K8S = ROOT / "deploy" / "k8s"
OVERLAYS = tuple(sorted(path.name for path in (K8S / "overlays").iterdir()))
FOLDERS = ("cluster", *(f"overlays/{name}" for name in OVERLAYS))
COMPARED = ("same-node", "apart")
OLDEST, NEWEST = "1.34", "1.37"  # DRA is v1 from 1.34 on
CORES_PER_DEVICE = 4  # logical cores of a Trainium2 device at LNC 2
KUBECTL = shutil.which("kubectl")

# Flags and roles of branches that are not merged yet. Each entry fails a test below once it has arrived: remove it.
PENDING_MAIN = (
    ("accept_tokens", str),
    ("compile_for", str),
    ("compiled_dir", str),
    ("cores", str),
    ("log_format", str),
    ("metrics_host", str),
    ("metrics_port", int),
    ("neuron_config", str),
    ("tls_ca", str),
    ("tls_cert", str),
    ("tls_key", str),
    ("token_file", str),
)
PENDING_ROLES = ("compile",)
PENDING_COMPARISON = (("tls_ca", str), ("token_file", str))


@cache
def objects(folder: str) -> list[dict[str, Any]]:
    return build(K8S / folder)


def of_kind(folder: str, kind: str) -> dict[str, dict[str, Any]]:
    return {each["metadata"]["name"]: each for each in objects(folder) if each["kind"] == kind}


def pods(folder: str) -> dict[str, dict[str, Any]]:
    """Pod templates by the name of what has them."""
    return {each["metadata"]["name"]: pod for each in objects(folder) if (pod := pod_of(each))}


def filled(word: str, values: dict[str, str]) -> str:
    """$(NAME) as a kubelet does it."""
    return re.sub(r"\$\((\w+)\)", lambda match: values.get(match[1], match[0]), word)


def programs() -> list[tuple[str, str, list[str]]]:
    """(folder, container, command line) of every container that runs a program of ours, variables filled in."""
    found = []
    for folder in FOLDERS:
        models = {k: v for each in of_kind(folder, "ConfigMap").values() for k, v in each["data"].items()}
        for container in containers(objects(folder)):
            words = [*container["command"], *container.get("args", ())]
            line = [filled(word, models) for word in words]
            if any(word.endswith(".py") for word in line):
                found.append((folder, container["name"], line))
    return found


PROGRAMS = programs()


def parser_of(program: str) -> argparse.ArgumentParser:
    """Of main.py or compare_architectures.py, with the flags that are still to come."""
    if program == "compare_architectures.py":
        parser: argparse.ArgumentParser = compare_architectures.build_parser()
        pending = PENDING_COMPARISON
    else:
        parser, pending = main.parser(), PENDING_MAIN
        role = next(action for action in parser._actions if action.dest == "role")
        role.choices = [*(role.choices or ()), *PENDING_ROLES]
    for name, kind in pending:
        parser.add_argument(f"--{name}", f"--{name.replace('_', '-')}", type=kind)
    return parser


def test_pending_flags_have_not_arrived_yet() -> None:
    """Fails when a branch brings one: then it is no longer pending."""
    known = {spelling for action in main.parser()._actions for spelling in action.option_strings}
    compared = {
        spelling for action in compare_architectures.build_parser()._actions for spelling in action.option_strings
    }
    assert [name for name, _ in PENDING_MAIN if f"--{name}" in known] == []
    assert [name for name in PENDING_ROLES if name in main.ROLES] == []
    assert [name for name, _ in PENDING_COMPARISON if f"--{name}" in compared] == []


@pytest.mark.parametrize("folder", FOLDERS)
@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_every_object_is_valid(folder: str, version: str) -> None:
    """Strictly: an unknown field is an error. Karpenter's kinds by our own schema of what we use of them."""
    assert objects(folder)
    for each in objects(folder):
        if each["kind"] in KINDS:
            jsonschema.validate(each, KINDS[each["kind"]])
        else:
            kubernetes_validate.validate(each, version, strict=True)


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_wrong_field_or_a_missing_one_is_seen(folder: str) -> None:
    each = yaml.safe_load(yaml.safe_dump(objects(folder)[-1]))
    each["spec"]["replicass"] = 1
    with pytest.raises((jsonschema.ValidationError, kubernetes_validate.ValidationError)):
        if each["kind"] in KINDS:
            jsonschema.validate(each, KINDS[each["kind"]])
        else:
            kubernetes_validate.validate(each, OLDEST, strict=True)


@pytest.mark.skipif(KUBECTL is None, reason="kubectl is absent: overlays are built by tests/deploy/kustomize.py alone")
@pytest.mark.parametrize("folder", FOLDERS)
def test_kubectl_builds_the_same_objects(folder: str) -> None:
    built = subprocess.run(
        [KUBECTL or "", "kustomize", str(K8S / folder)], capture_output=True, text=True, check=True, timeout=60
    )
    theirs = list(yaml.safe_load_all(built.stdout))

    def by_name(each: dict[str, Any]) -> tuple[str, str]:
        return each["kind"], each["metadata"]["name"]

    assert sorted(theirs, key=by_name) == sorted(objects(folder), key=by_name)


def test_every_folder_is_part_of_some_overlay() -> None:
    used = {
        (K8S / "overlays" / name / resource).resolve().name
        for name in OVERLAYS
        for resource in yaml.safe_load((K8S / "overlays" / name / "kustomization.yaml").read_text())["resources"]
    }
    assert used == {path.name for path in K8S.iterdir()} - {"cluster", "overlays"}


@pytest.mark.parametrize(("folder", "container", "line"), PROGRAMS, ids=lambda value: str(value)[:40])
def test_a_programs_flags_are_its_own(folder: str, container: str, line: list[str]) -> None:
    at = next(i for i, word in enumerate(line) if word.endswith(".py"))
    assert (ROOT / line[at]).is_file()
    assert not any("$(" in word for word in line), "a variable that no ConfigMap has"
    arguments = parser_of(line[at]).parse_args(line[at + 1 :])
    ranks = [word.partition("=")[2] for word in line[:at] if word.startswith("--nproc-per-node=")]
    if line[at] == "main.py":
        processes = (
            1 if arguments.backend == "nxdi" else arguments.tp_degree
        )  # NxD Inference's is one, whatever the degree
        assert int(ranks[0] if ranks else 1) == processes
        assert (line[0] == "torchrun") == (processes > 1)
    else:
        compare_architectures.build_config(arguments)


def flags(container: dict[str, Any]) -> dict[str, str]:
    return dict(word.lstrip("-").partition("=")[::2] for word in container["args"])


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
