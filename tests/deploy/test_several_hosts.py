"""The overlay that runs one target on several hosts: its pods, its devices, who talks to whom."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from tests.deploy.manifests import INVALID, filled, flags, objects, of_kind, pods, valid, values_of
from tests.deploy.test_kubernetes_pieces import CORES_PER_DEVICE

FOLDER = "overlays/several-hosts"
LEADER, WORKER = "target-ranks", "target-ranks worker"
SET = of_kind(FOLDER, "LeaderWorkerSet")[LEADER]["spec"]["leaderWorkerTemplate"]


def container(name: str) -> dict[str, Any]:
    (found,) = pods(FOLDER)[name]["spec"]["containers"]
    return dict(found)


def test_the_pods_of_a_group_differ_in_what_answers_others_alone() -> None:
    leader, worker = copy.deepcopy(pods(FOLDER)[LEADER]), pods(FOLDER)[WORKER]
    assert leader["metadata"]["labels"].pop("tandem/service") == "target"
    for name in ("ports", "startupProbe", "readinessProbe", "livenessProbe"):
        assert leader["spec"]["containers"][0].pop(name)
    assert leader == worker


def test_every_host_starts_the_same_command_and_all_ranks_have_a_core() -> None:
    values = values_of(FOLDER)
    options = dict(filled(word, values).partition("=")[::2] for word in container(LEADER)["command"])
    ranks = int(options["--nnodes"]) * int(options["--nproc-per-node"])
    assert ranks == int(filled(flags(container(LEADER))["tp_degree"], values))
    requests = of_kind(FOLDER, "ResourceClaimTemplate")["ranks"]["spec"]["spec"]["devices"]["requests"]
    neurons = requests[0]["exactly"]
    assert (neurons["deviceClassName"], neurons["count"] * CORES_PER_DEVICE * SET["size"]) == ("neuron.aws.com", ranks)
    assert "$(LWS_WORKER_INDEX)" in str(container(LEADER)["command"]) and options["--master-addr"] == (
        "target-ranks-0.target-ranks.tandem"
    )


def test_hosts_are_others_and_a_group_starts_again_as_a_whole() -> None:
    (term,) = pods(FOLDER)[WORKER]["spec"]["affinity"]["podAntiAffinity"][
        "requiredDuringSchedulingIgnoredDuringExecution"
    ]
    assert term["topologyKey"] == "kubernetes.io/hostname"
    for name in (LEADER, WORKER):
        labels = pods(FOLDER)[name]["metadata"]["labels"].items()
        assert term["labelSelector"]["matchLabels"].items() <= labels
    assert SET["restartPolicy"] == "RecreateGroupOnPodRestart"


def test_clients_reach_rank_0_alone_and_ranks_reach_each_other() -> None:
    leader, worker = (pods(FOLDER)[name]["metadata"]["labels"].items() for name in (LEADER, WORKER))
    service = of_kind(FOLDER, "Service")["target"]["spec"]
    assert service["selector"].items() <= leader and not service["selector"].items() <= worker
    assert str(service["ports"][0]["port"]) == flags(container(LEADER))["port"]
    assert LEADER not in of_kind(FOLDER, "Service"), "the controller makes a Service of that name"
    policy = of_kind(FOLDER, "NetworkPolicy")["ranks"]["spec"]
    (rule,) = policy["ingress"]
    (peer,) = rule["from"]
    for labels in (leader, worker):
        assert policy["podSelector"]["matchLabels"].items() <= labels
        assert peer["podSelector"]["matchLabels"].items() <= labels
    assert "ports" not in rule, "gloo listens on ports of its own choice"


def test_rank_0_is_probed_where_it_answers_and_has_longer_to_stop_than_it_drains() -> None:
    asked, spec = flags(container(LEADER)), pods(FOLDER)[LEADER]["spec"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container(LEADER)[probe]["grpc"]["port"] == int(asked["health_port"])
    assert container(LEADER)["readinessProbe"]["grpc"]["service"] == "tandem.v1.TargetVerifier"
    assert float(asked["drain_seconds"]) < 30 <= spec["terminationGracePeriodSeconds"] - float(asked["drain_seconds"])
    assert {"tls_cert", "tls_key", "accept_tokens"} <= set(asked)


def test_every_host_compiles_what_its_ranks_will_serve() -> None:
    """The same ranks, devices, shapes and folder; the pods are hosts of their own, and find the first by its name."""
    ahead = "overlays/compile-several-hosts"
    job, values = of_kind(ahead, "Job")["compile"]["spec"], values_of(ahead)
    spec, served = job["template"]["spec"], container(LEADER)
    (made,) = spec["initContainers"]
    compiled, wanted = flags(made), flags(served)
    shape = ("target_model", "device", "dtype", "sequence_length", "batch", "tp_degree", "compiled_dir")
    differ = [name for name in (*shape, "max_speculation_length") if compiled.get(name) != wanted.get(name)]
    assert differ == [] and compiled["compile_for"] == "target" and values.items() >= values_of_models(FOLDER).items()
    started, other = (dict(filled(w, values).partition("=")[::2] for w in each["command"]) for each in (made, served))
    hosts = int(started["--nnodes"])
    assert job["completionMode"] == "Indexed" and job["completions"] == job["parallelism"] == hosts == SET["size"]
    assert started["--nproc-per-node"] == other["--nproc-per-node"] and "$(JOB_COMPLETION_INDEX)" in str(
        made["command"]
    )
    service = of_kind(ahead, "Service")["compile"]
    assert (
        started["--master-addr"] == f"compile-0.{spec['subdomain']}.tandem" and service["metadata"]["name"] == "compile"
    )
    assert service["spec"]["selector"].items() <= job["template"]["metadata"]["labels"].items()
    assert service["spec"]["publishNotReadyAddresses"] and service["spec"]["clusterIP"] == "None"
    worker = pods(FOLDER)[WORKER]
    assert worker["metadata"]["labels"].items() <= job["template"]["metadata"]["labels"].items()
    for name in ("affinity", "resourceClaims", "nodeSelector"):
        assert spec[name] == worker["spec"][name]
    (restored,) = worker["spec"]["initContainers"]
    assert spec["containers"][0]["args"] == restored["args"], "published where the server looks"


def values_of_models(folder: str) -> dict[str, str]:
    return dict(of_kind(folder, "ConfigMap")["models"]["data"])


@pytest.mark.parametrize("where", ["spec", "group", "pod"])
def test_a_wrong_field_of_the_set_is_seen_wherever_it_is(where: str) -> None:
    wrong = copy.deepcopy(next(each for each in objects(FOLDER) if each["kind"] == "LeaderWorkerSet"))
    group = wrong["spec"]["leaderWorkerTemplate"]
    {"spec": wrong["spec"], "group": group, "pod": group["workerTemplate"]["spec"]}[where]["sizes"] = 1
    with pytest.raises(INVALID):
        valid(wrong)
