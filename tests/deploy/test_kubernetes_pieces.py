"""That the manifests' pieces fit: ports, probes, mounts, claims, who is where, who may call whom."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from tandem.cli import main
from tandem.cli.models import nxdi_settings
from tandem.services.shutdown import STOP_SECONDS
from tandem_nxdi.build import BuildRequest, Kind, plan_build
from tests.deploy.manifests import OVERLAYS, ROOT, filled, flags, objects, of_kind, pods
from tests.deploy.starting import SERVICES
from tests.services.test_observability_page import exported

NXDI = [name for name in OVERLAYS if "nxdi" in name]
COMPARED = ("same-node", "apart")
CORES_PER_DEVICE = 4  # logical cores of a Trainium2 device at LNC 2


@pytest.mark.parametrize(
    ("folder", "name"),
    [(f"overlays/{o}", name) for o in OVERLAYS for name in of_kind(f"overlays/{o}", "StatefulSet")],
)
class TestAServer:
    def container(self, folder: str, name: str) -> dict[str, Any]:
        (container,) = (each for each in pods(folder)[name]["spec"]["containers"] if each["name"] == name)
        return dict(container)

    def test_is_probed_by_its_services_name_where_it_answers_probes(self, folder: str, name: str) -> None:
        container = self.container(folder, name)
        protos = "".join(path.read_text() for path in (ROOT / "proto" / "tandem" / "v1").glob("*.proto"))
        service = SERVICES[flags(container)["role"]]
        assert f"service {service} {{" in protos
        for probe in ("startupProbe", "readinessProbe"):
            assert container[probe]["grpc"]["service"] == f"tandem.v1.{service}"
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert container[probe]["grpc"]["port"] == int(flags(container)["health_port"])

    def test_listens_on_the_ports_that_it_names(self, folder: str, name: str) -> None:
        container = self.container(folder, name)
        ports = {port["name"]: str(port["containerPort"]) for port in container["ports"]}
        asked = flags(container)
        flag_of = {"grpc": "port", "health": "health_port", "metrics": "metrics_port", "https": "http_port"}
        assert ports == {port: asked[flag] for port, flag in flag_of.items() if flag in asked}
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
            in_the_image = [file for file in files if (ROOT / file.removeprefix("/opt/tandem/")).is_file()]
            assert all(
                f"/{file.split('/')[1]}" in mounts or file in mounts or file == "/cache/compiled"
                for file in files
                if file not in in_the_image
            )
            for source in container.get("envFrom", ()):
                assert source["configMapRef"]["name"] in of_kind(folder, "ConfigMap")
            claimed = {claim["name"] for claim in container.get("resources", {}).get("claims", ())}
            assert claimed <= {claim["name"] for claim in spec.get("resourceClaims", ())}, name


def test_openai_clients_reach_the_fused_server_by_https_with_a_key_and_by_no_other_port() -> None:
    folder = "overlays/fused-openai"
    (container,) = pods(folder)["fused"]["spec"]["containers"]
    asked, ports = flags(container), {port["name"]: str(port["containerPort"]) for port in container["ports"]}
    assert ports["https"] == asked["http_port"] and asked["http_host"] == "0.0.0.0" and "insecure" not in asked
    policies = of_kind(folder, "NetworkPolicy")
    rules = [rule for name in ("callers", "openai", "metrics") for rule in policies[name]["spec"]["ingress"]]
    assert {port["port"] for rule in rules for port in rule["ports"]} == set(ports) - {"health"}
    service, labels = of_kind(folder, "Service")["openai"]["spec"], pods(folder)["fused"]["metadata"]["labels"]
    assert service["ports"][0]["targetPort"] == "https" and service["selector"].items() <= labels.items()
    assert policies["openai"]["spec"]["podSelector"]["matchLabels"].items() <= labels.items()


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
        assert set(claim["constraints"][0]["requests"]) == {request["name"] for request in claim["requests"]}
        (config,) = claim["config"]
        assert config["opaque"]["parameters"] == {
            "apiVersion": "neuron.aws.com/v1",
            "kind": "NeuronConfig",
            "logicalNeuronCore": 2,
        }
        assert config["requests"] == [claim["requests"][0]["name"]]


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


def given_to_nxdi(overlay: str) -> list[tuple[str, int, int, int, int]]:
    """Of each program with --backend nxdi: what it is, draft tokens, NxD Inference's K, its degree, devices claimed."""
    folder, found = f"overlays/{overlay}", []
    models = of_kind(folder, "ConfigMap")["models"]["data"]
    for name, pod in pods(folder).items():
        for container in (*pod["spec"].get("initContainers", ()), *pod["spec"]["containers"]):
            words = [filled(word, models).replace("/opt/tandem/", "") for word in container.get("args", ())]
            if "--backend=nxdi" not in words:
                continue
            args = main.parser().parse_args(words)
            drafts, part = args.most_drafts, args.compile_for or args.role.removesuffix("_target")
            kind = Kind.FUSED if part == "fused" else Kind.WINDOW if drafts else Kind.PLAIN
            request = BuildRequest(kind, args.batch, args.sequence_length, drafts, args.dtype)
            neuron = plan_build(request, nxdi_settings(args)).neuron
            what = f"compile {part}" if args.role == "compile" else part
            found.append((what, drafts, neuron["speculation_length"], neuron["tp_degree"], devices(folder, name)))
    return found


@pytest.mark.parametrize("overlay", NXDI)
def test_what_nxd_inference_gets_is_what_the_sample_says(overlay: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """K counts the committed token there: the samples' 7 are 6 of our draft tokens. And every core is used."""
    monkeypatch.chdir(ROOT)
    given = given_to_nxdi(overlay)
    assert given
    readme = (ROOT / "deploy" / "README.md").read_text(encoding="utf-8")
    for what, drafts, k, degree, count in given:
        assert (drafts, k) == ((6, 7) if "fused" in what else (0, 0))
        assert degree == count * CORES_PER_DEVICE
        assert f"| `{overlay}` | {what} | {drafts} | {k} | {degree} | {count} |" in readme


def test_nxd_inference_finds_what_was_compiled_for_it() -> None:
    """A job's flags are its server's, but for its role."""
    jobs = {each["name"]: flags(each) for each in containers_of("compile-nxdi", "compile")}
    for part, name in (("plain", "target"), ("fused", "fused")):
        (served,) = (flags(each) for each in containers_of("comparison-nxdi", name))
        compiled = {k: v for k, v in jobs[part].items() if k not in ("role", "compile_for")}
        assert {name: served.get(name) for name in compiled} == compiled
    (compiled,) = (flags(each) for each in containers_of("compile-nxdi-405b", "compile"))
    (served,) = (flags(each) for each in containers_of("fused-nxdi-405b", "fused"))
    assert {k: v for k, v in compiled.items() if k not in ("role", "compile_for")}.items() <= served.items()
    data = {o: of_kind(f"overlays/{o}", "ConfigMap")["models"]["data"] for o in OVERLAYS}
    for ahead, later in (("compile-nxdi", "comparison-nxdi"), ("compile-nxdi-405b", "fused-nxdi-405b")):
        assert data[ahead] == data[later]


def containers_of(overlay: str, name: str) -> list[dict[str, Any]]:
    spec = pods(f"overlays/{overlay}")[name]["spec"]
    return [each for each in (*spec.get("initContainers", ()), *spec["containers"]) if "backend=nxdi" in str(each)]


def ports_of(pod: dict[str, Any]) -> list[dict[str, Any]]:
    return [port for container in pod["spec"]["containers"] for port in container.get("ports", ())]


def test_the_collector_asks_for_metrics_and_ports_that_exist() -> None:
    config = yaml.safe_load(of_kind("monitoring", "ConfigMap")["adot"]["data"]["collector.yaml"])
    (scrape,) = config["receivers"]["prometheus"]["config"]["scrape_configs"]
    (services, port, *_) = (rule["regex"] for rule in scrape["relabel_configs"] if rule.get("action") == "keep")
    assert services == "(target|draft|fused)" and port == "metrics"
    monitored = of_kind("prometheus", "PodMonitor")["tandem"]["spec"]
    scraped = {each["port"] for each in monitored["podMetricsEndpoints"]}
    named = {port["name"] for o in OVERLAYS for pod in pods(f"overlays/{o}").values() for port in ports_of(pod)}
    assert scraped == {name for name in named if "metrics" in name}
    (declared,) = config["exporters"]["awsemf"]["metric_declarations"]
    names = set(exported())
    for selector in declared["metric_name_selectors"]:
        assert any(re.search(selector, name) for name in names), selector
    (receivers, exporters) = (config["service"]["pipelines"]["metrics"][part] for part in ("receivers", "exporters"))
    assert set(receivers) == set(config["receivers"]) and set(exporters) == set(config["exporters"])


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
        for name, pod in pods(f"overlays/{overlay}").items():
            assert pod["spec"].get("nodeSelector", {}).items() <= template["metadata"]["labels"].items()
            assert name == "vllm" or any(each["key"] == taint["key"] for each in pod["spec"]["tolerations"])


def test_the_baseline_of_vllm_serves_what_the_target_does_and_the_comparison_alone_may_call_it() -> None:
    folder = "overlays/vllm-neuron"
    models = of_kind(folder, "ConfigMap")["models"]["data"]
    (vllm,) = pods(folder)["vllm"]["spec"]["containers"]
    (target,) = pods(folder)["target"]["spec"]["containers"]
    asked, ours = flags(vllm), flags(target)
    assert vllm["command"] == ["vllm", "serve", ours["target_model"]] and asked["dtype"] == ours["dtype"]
    assert asked["max-model-len"] == ours["sequence_length"] and asked["max-num-seqs"] == ours["batch"]
    assert int(filled(asked["tensor-parallel-size"], models)) == devices(folder, "vllm") * CORES_PER_DEVICE
    (compare,) = pods(folder)["comparison"]["spec"]["initContainers"]
    (connected,) = (word for word in compare["args"] if word.startswith("--connect=openai="))
    (port,) = (each["containerPort"] for each in vllm["ports"])
    assert connected == f"--connect=openai=http://vllm.tandem.svc:{port}/v1"
    (rule,) = of_kind(folder, "NetworkPolicy")["vllm"]["spec"]["ingress"]
    (caller,) = rule["from"]
    assert caller["podSelector"]["matchLabels"].items() <= pods(folder)["comparison"]["metadata"]["labels"].items()
