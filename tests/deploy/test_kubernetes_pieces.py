"""That the manifests' pieces fit: ports, probes, mounts, claims, who is where, who may call whom."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tandem.cli.command_line import RoleParser
from tandem.cli.models import nxdi_settings
from tandem.runners.load_runner import Shape
from tandem.services.security.callers import read_tokens
from tandem_nxdi.shapes import Kind, plan_build
from tests.deploy.manifests import OVERLAYS, ROOT, filled, flags, of_kind, pods

NXDI = [name for name in OVERLAYS if "nxdi" in name]
COMPARED = ("same-node", "apart")
IDENTITIES = ("draft-worker", "vllm", "comparison", "target")
SERVICES = {"target": "TargetVerifier", "draft_worker": "DraftWorker", "fused_target": "FusedSpeculativeServer"}
CORES_PER_DEVICE = 4  # logical cores of a Trainium2 device at LNC 2


@pytest.mark.parametrize(
    ("folder", "name"), [(f"overlays/{o}", name) for o in OVERLAYS for name in of_kind(f"overlays/{o}", "StatefulSet")]
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

    def test_shows_a_certificate_and_asks_for_tokens(self, folder: str, name: str) -> None:
        asked = flags(self.container(folder, name))
        assert {"tls_cert", "tls_key", "accept_tokens"} <= set(asked)
        assert "insecure" not in asked


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


def devices(folder: str, name: str) -> int:
    (claim,) = pods(folder)[name]["spec"]["resourceClaims"]
    template = of_kind(folder, "ResourceClaimTemplate")[claim["resourceClaimTemplateName"]]
    return int(template["spec"]["spec"]["devices"]["requests"][0]["exactly"]["count"])


def given_to_nxdi(overlay: str) -> list[tuple[str, int, int, int, int]]:
    """Of each program with --backend nxdi: what it is, draft tokens, NxD Inference's K, its degree, devices claimed."""
    folder, found = f"overlays/{overlay}", []
    models = of_kind(folder, "ConfigMap")["models"]["data"]
    for name, pod in pods(folder).items():
        for container in (*pod["spec"].get("initContainers", ()), *pod["spec"]["containers"]):
            words = [filled(word, models).replace("/opt/tandem/", "") for word in container.get("args", ())]
            if "--backend=nxdi" not in words:
                continue
            args = RoleParser().parse_args(words)
            drafts, part = args.most_drafts, args.compile_for or args.role.removesuffix("_target")
            kind = Kind.FUSED if part == "fused" else Kind.WINDOW if drafts else Kind.PLAIN
            shape = Shape(args.batch, args.sequence_length, drafts)
            neuron = plan_build(kind, shape, nxdi_settings(args, shape), args.dtype).neuron
            what = f"compile {part}" if args.role == "compile" else part
            found.append((what, drafts, neuron["speculation_length"], neuron["tp_degree"], devices(folder, name)))
    return found


@pytest.mark.parametrize("overlay", NXDI)
def test_what_nxd_inference_gets_is_what_the_sample_says(overlay: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """K counts the committed token there: the samples' 7 are 6 of our draft tokens. And every core is used."""
    monkeypatch.chdir(ROOT)
    given = given_to_nxdi(overlay)
    assert given
    for what, drafts, k, degree, count in given:
        assert (drafts, k) == ((6, 7) if "fused" in what else (0, 0))
        assert degree == count * CORES_PER_DEVICE


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


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is absent: apt install openssl")
def test_the_secrets_of_a_deployment_are_a_valid_certificate_and_tokens_that_servers_read(tmp_path: Path) -> None:
    subprocess.run(["sh", ROOT / "deploy/secrets.sh", tmp_path], check=True)
    verify = ["openssl", "verify", "-verify_hostname", "target.tandem.svc", "-CAfile", "tls/ca.crt", "tls/tls.crt"]
    subprocess.run(verify, cwd=tmp_path, check=True)
    accepted = (tmp_path / "tokens/accepted").read_text().splitlines()
    assert accepted == [f"{name} {(tmp_path / 'tokens' / name).read_text().strip()}" for name in IDENTITIES]
    assert tuple(name for _, name in read_tokens(str(tmp_path / "tokens/accepted"))) == IDENTITIES
