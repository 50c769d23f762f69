"""deploy/eks/cluster.yaml: what the manifests need of a cluster is there.

Also validated by hand against eksctl's own schema (v1alpha5, August 2026), which no package contains.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from tests.deploy.manifests import K8S, OLDEST, OVERLAYS, ROOT, of_kind, pods

CLUSTER: dict[str, Any] = yaml.safe_load((ROOT / "deploy" / "eks" / "cluster.yaml").read_text(encoding="utf-8"))
GROUPS = {group["name"]: group for group in CLUSTER["managedNodeGroups"]}


def test_it_has_the_version_and_the_region_of_the_manifests() -> None:
    assert CLUSTER["metadata"]["version"] == OLDEST
    region = CLUSTER["metadata"]["region"]
    (volume,) = of_kind("overlays/fused-openai", "PersistentVolume").values()
    assert f"region {region}" in volume["spec"]["mountOptions"]
    exporter = yaml.safe_load(of_kind("monitoring", "ConfigMap")["adot"]["data"]["collector.yaml"])["exporters"][
        "awsemf"
    ]
    assert exporter["region"] == region and GROUPS["trn2"]["availabilityZones"][0].startswith(region)


def test_pods_with_a_claim_run_on_its_trn2_nodes_and_on_no_other() -> None:
    trn2 = GROUPS["trn2"]
    (taint,) = trn2["taints"]
    pool = of_kind("cluster", "NodePool")["trn2"]["spec"]["template"]
    assert (trn2["labels"], trn2["taints"]) == (pool["metadata"]["labels"], pool["spec"]["taints"])
    for overlay in OVERLAYS:
        for pod in pods(f"overlays/{overlay}").values():
            if pod["spec"].get("resourceClaims"):
                assert pod["spec"]["nodeSelector"].items() <= trn2["labels"].items()
                assert taint["key"] in [each["key"] for each in pod["spec"]["tolerations"]]
    assert "RAID0" in trn2["overrideBootstrapCommand"], "what is compiled lies on the instance's disks"
    assert not GROUPS["system"].get("taints"), "CoreDNS and the drivers' controllers run there"


def test_what_calls_aws_has_a_role_and_no_more_rights_than_it_uses() -> None:
    (bucket,) = {
        volume["spec"]["csi"]["volumeAttributes"]["bucketName"]
        for overlay in OVERLAYS
        for volume in of_kind(f"overlays/{overlay}", "PersistentVolume").values()
    }
    addons = {addon["name"]: addon for addon in CLUSTER["addons"]}
    assert "eks-pod-identity-agent" in addons
    (association,) = addons["aws-mountpoint-s3-csi-driver"]["podIdentityAssociations"]
    statements = association["permissionPolicy"]["Statement"]
    assert {each for s in statements for each in s["Resource"]} == {
        f"arn:aws:s3:::{bucket}",
        f"arn:aws:s3:::{bucket}/*",
    }
    assert not any("*" in action for statement in statements for action in statement["Action"])
    (collector,) = CLUSTER["iam"]["podIdentityAssociations"]
    account = of_kind("monitoring", "ServiceAccount")[collector["serviceAccountName"]]
    assert account["metadata"]["namespace"] == collector["namespace"]
    assert "annotations" not in account["metadata"], "IRSA's annotation would win over Pod Identity"


def test_no_device_plugin_is_installed_beside_the_dra_driver() -> None:
    pages = (ROOT / "deploy" / "README.md", *(ROOT / "docs" / "recipes").glob("*.md"), K8S.parent / "eks/cluster.yaml")
    for page in pages:
        for line in page.read_text(encoding="utf-8").splitlines():
            if re.search(r"eksctl create cluster ", line):
                assert "--install-neuron-plugin=false" in line, page
            if re.search(r"^helm .*neuron-helm-chart", line):
                assert "devicePlugin.enabled=false" in line and "draDriver.enabled=true" in line, page
