"""The overlays of KServe and llm-d: what their controllers make of our objects, by their sources, is what we need."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from cryptography import x509

from tests.deploy.manifests import filled, flags, of_kind, pods, values_of
from tests.deploy.starting import SERVICES, make_secrets
from tests.deploy.test_kubernetes_pieces import CORES_PER_DEVICE, devices
from tests.services.test_observability_page import exported

LLM_D = "overlays/llm-d"
CONFIG = yaml.safe_load(of_kind(LLM_D, "ConfigMap")["picker"]["data"]["plugins.yaml"])
ENGINE = next(each for each in CONFIG["plugins"] if each["type"] == "core-metrics-extractor")["parameters"][
    "engineConfigs"
][0]
PICKED = [value for name, value in ENGINE.items() if name.endswith("Spec")]
"""The metrics that llm-d's endpoint picker reads of a server."""


@pytest.fixture(scope="module")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_secrets(tmp_path_factory.mktemp("secrets"))


@pytest.mark.parametrize("folder", ["overlays/kserve", "overlays/kserve-distributed"])
class TestAnInferenceService:
    def container(self, folder: str) -> dict[str, Any]:
        (container,) = pods(folder)["tandem"]["spec"]["containers"]
        return dict(container)

    def test_has_the_openai_door_where_kserves_service_leads(self, folder: str) -> None:
        """KServe's Service has the first port of the container as its 80; a port named grpc would get a route."""
        container = self.container(folder)
        asked, ports = flags(container), [(each["name"], str(each["containerPort"])) for each in container["ports"]]
        assert ports == [("openai", asked["http_port"]), ("metrics", asked["metrics_port"])]
        assert asked["http_host"] == "0.0.0.0" and {"tls_cert", "tls_key", "accept_tokens"} <= set(asked)
        assert container["name"] == "kserve-container" and "insecure" not in asked

    def test_says_what_kserve_would_else_set_itself(self, folder: str) -> None:
        """One core and 2 GiB, a second pod beside the first, a minute for a request."""
        predictor = of_kind(folder, "InferenceService")["tandem"]["spec"]["predictor"]
        resources = self.container(folder)["resources"]
        assert set(resources["limits"]) == set(resources["requests"]) == {"cpu", "memory"}
        assert predictor["deploymentStrategy"] == {"type": "Recreate"} and predictor["timeout"] >= 600

    def test_is_probed_by_its_services_name_and_uses_the_cores_of_its_claim(self, folder: str) -> None:
        container, asked = self.container(folder), flags(self.container(folder))
        for probe in ("startupProbe", "readinessProbe"):
            assert container[probe]["grpc"]["service"] == f"tandem.v1.{SERVICES[asked['role']]}"
            assert container[probe]["grpc"]["port"] == int(asked["health_port"])
        ranks = int(filled(asked.get("tp_degree", "1"), values_of(folder)))
        assert (devices(folder, "tandem") * CORES_PER_DEVICE == ranks) or (ranks, asked["cores"]) == (1, "0")

    def test_gateways_reach_it_with_tls_alone_by_a_name_of_its_certificate(self, folder: str, secrets: Path) -> None:
        policy = of_kind(folder, "BackendTLSPolicy")["tandem"]["spec"]
        assert [each["name"] for each in policy["targetRefs"]] == ["tandem-predictor"]
        shown = x509.load_pem_x509_certificate((secrets / "tls" / "tls.crt").read_bytes())
        names = shown.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        assert policy["validation"]["hostname"] in names.get_values_for_type(x509.DNSName)
        through = of_kind(folder, "NetworkPolicy")["openai"]["spec"]
        labels = pods(folder)["tandem"]["metadata"]["labels"].items()
        assert through["podSelector"]["matchLabels"].items() <= labels
        assert [each["port"] for each in through["ingress"][0]["ports"]] == ["openai"]


def test_a_draft_worker_of_kserve_calls_the_target_beside_it() -> None:
    folder = "overlays/kserve-distributed"
    (draft,) = pods(folder)["tandem"]["spec"]["containers"]
    (target,) = pods(folder)["target"]["spec"]["containers"]
    assert flags(draft)["target_host"] == f"target.tandem.svc:{flags(target)['port']}"
    (rule,) = of_kind(folder, "NetworkPolicy")["callers"]["spec"]["ingress"]
    label = rule["from"][0]["podSelector"]["matchLabels"].items()
    assert label <= pods(folder)["tandem"]["metadata"]["labels"].items()
    (alone,) = pods("overlays/same-node")["draft"]["spec"]["containers"]
    known = ("http_port", "http_host", "max_speculation_length")
    assert {k: v for k, v in flags(draft).items() if k not in known} == flags(alone)


def test_the_pool_of_llm_d_is_the_fused_servers_and_its_picker_reads_metrics_that_they_have() -> None:
    pool, pod = of_kind(LLM_D, "InferencePool")["tandem"]["spec"], pods(LLM_D)["fused"]
    labels, (server,) = pod["metadata"]["labels"], pod["spec"]["containers"]
    assert pool["selector"]["matchLabels"].items() <= labels.items()
    assert pool["targetPorts"] == [{"number": int(flags(server)["http_port"])}]
    assert labels["llm-d.ai/engine-type"] == ENGINE["name"]
    assert len(PICKED) == 3 and set(PICKED) <= set(exported())
    named = [each["type"] for each in CONFIG["plugins"]]
    assert {each["pluginRef"] for profile in CONFIG["schedulingProfiles"] for each in profile["plugins"]} <= set(named)
    (source,) = (each["parameters"] for each in CONFIG["plugins"] if each["type"] == "metrics-data-source")
    assert source == {"scheme": "http", "path": "/metrics"} and "tls_cert" not in flags(server)
    (route,) = of_kind(LLM_D, "HTTPRoute")["tandem"]["spec"]["rules"]
    assert [(each["kind"], each["name"]) for each in route["backendRefs"]] == [("InferencePool", "tandem")]


def test_the_picker_is_where_the_pool_says_and_looks_at_that_pool() -> None:
    reference = of_kind(LLM_D, "InferencePool")["tandem"]["spec"]["endpointPickerRef"]
    service, pod = of_kind(LLM_D, "Service")[reference["name"]]["spec"], pods(LLM_D)["picker"]
    (picker,) = pod["spec"]["containers"]
    (port,) = service["ports"]
    assert port["port"] == reference["port"]["number"] == int(flags(picker)["grpc-port"])
    assert service["selector"].items() <= pod["metadata"]["labels"].items()
    assert flags(picker)["pool-name"] == "tandem" and flags(picker)["config-file"] == "/config/plugins.yaml"
    (binding,) = of_kind(LLM_D, "RoleBinding")["picker"]["subjects"]
    assert binding["name"] == pod["spec"]["serviceAccountName"]


def test_the_clear_text_of_llm_d_is_guarded_by_policies() -> None:
    """No pod of the overlay may call gRPC; HTTP is for the picker and for gateways of namespaces that say so."""
    policies = of_kind(LLM_D, "NetworkPolicy")
    (rule,) = policies["pool"]["spec"]["ingress"]
    spaces, picker = rule["from"]
    assert [each["port"] for each in rule["ports"]] == ["openai"]
    assert spaces == {"namespaceSelector": {"matchLabels": {"tandem/gateway": "true"}}}
    calling = [
        name
        for name, pod in pods(LLM_D).items()
        if picker["podSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    ]
    assert calling == ["picker"]
    assert not any("tandem/client" in pod["metadata"]["labels"] for pod in pods(LLM_D).values())
    assert policies["nobody"]["spec"] == {"podSelector": {}, "policyTypes": ["Ingress"]}
