"""Checks the commands of recipes that are other programs', as far as that goes without an account or a device.

`KNOWN` has the commands and flags that the pages use, looked up in the programs' references (AWS CLI 2, eksctl, kubectl
1.34, Helm 3, docker, pip, hf). A command or flag that is not in it is an error, so a page cannot grow unchecked ones.
What a command names (folders, files, stages, objects) must exist.
tests/recipes/installed.py asks the programs themselves.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from packaging.requirements import Requirement

from tandem.cli import main as cli
from tests.deploy.kustomize import build, containers
from tests.deploy.manifests import FOLDERS, objects, valid

ROOT = Path(__file__).resolve().parents[2]
KNOWN: dict[str, str] = {
    "aws cloudwatch put-metric-data": "--namespace --region --metric-data",
    "aws ec2 create-key-pair": "--key-name --query --output",
    "aws ec2 delete-key-pair": "--key-name",
    "aws ec2 describe-images": "--owners --filters --query --output",
    "aws ec2 describe-instances": "--instance-ids --query --output",
    "aws ec2 run-instances": "--image-id --instance-type --key-name --metadata-options --block-device-mappings"
    " --query --output",
    "aws ec2 terminate-instances": "--instance-ids",
    "aws ecr create-repository": "--repository-name --region",
    "aws ecr delete-repository": "--repository-name --region --force",
    "aws ecr get-login-password": "--region",
    "aws s3 mb": "--region",
    "aws s3 rb": "--force",
    "aws s3 rm": "--recursive",
    "aws s3 sync": "",
    "docker build": "-f --target -t",
    "docker login": "--username --password-stdin",
    "docker push": "",
    "docker run": "--rm --device --network --shm-size --cap-add -v",
    "docker tag": "",
    "eksctl create addon": "--cluster --name",
    "eksctl create cluster": "-f --install-neuron-plugin",
    "eksctl create iamserviceaccount": "--cluster --namespace --name --role-name --role-only --attach-policy-arn"
    " --approve",
    "eksctl create podidentityassociation": "--cluster --namespace --service-account-name --role-name"
    " --permission-policy-arns",
    "eksctl delete cluster": "--name --region --disable-nodegroup-eviction",
    "helm upgrade": "--install --set",
    "hf download": "--local-dir",
    "kubectl apply": "-k",
    "kubectl create configmap": "-n --from-file",
    "kubectl create secret generic": "-n --from-file",
    "kubectl delete": "-k --ignore-not-found -n",
    "kubectl get": "-n",
    "kubectl label namespace": "",
    "kubectl patch": "-n --type -p",
    "kubectl rollout": "-n --timeout",
    "kubectl wait": "-n --for --timeout",
    "kubectl port-forward": "-n",
    "neuron-top": "",
    "pip install": "-r --no-deps -c",
    "sh": "",
    "source": "",
    "sudo install": "-d -o",
}
ROUTES = ("/v1/completions", "/v1/chat/completions", "/v1/models", "/metrics")
FIELDS = {"model", "prompt", "messages", "max_tokens", "temperature", "stream"}
ENVIRONMENTS = (  # of AWS's images, by its documentation
    "/opt/aws_neuronx_venv_pytorch_2_9_nxd_inference/bin/activate",
    "/opt/aws_neuronx_venv_torch_neuronx_2_14_0/bin/activate",
)


def check(words: list[str]) -> str:
    """Returns how a command was checked. Raises AssertionError unless it is one that its program has."""
    if "|" in words:
        at = words.index("|")
        return f"{check(words[:at])} | {check(words[at + 1 :])}"
    if words[0] == "curl":
        return _curl(words[1:])
    if words[:2] == ["docker", "run"]:
        at = next(i for i, word in enumerate(words) if word.startswith("tandem:"))
        _in_the_container(words[at], words[at + 1 :])
        words = words[:at]
    name = _name_of(words)
    flags = {word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)}
    assert flags <= set(KNOWN[name].split()), f"{name}: {flags - set(KNOWN[name].split())}"
    more = MORE.get(words[0])
    return f"table of flags{', ' + more(name, words) if more else ''}"


def _in_the_container(image: str, words: list[str]) -> None:
    """A program of ours in an image that the container file says how to build."""
    assert f"-t {image} " in (ROOT / "deploy/Dockerfile").read_text(encoding="utf-8"), image
    assert cli.parser().parse_args(words[words.index("main.py") + 1 :]).role


def values(words: list[str], flag: str) -> list[str]:
    """The values of a flag, given as `--flag value` or `--flag=value`."""
    apart = [value for word, value in itertools.pairwise(words) if word == flag]
    return apart + [word.partition("=")[2] for word in words if word.startswith(f"{flag}=")]


def _name_of(words: list[str]) -> str:
    verb = [words[0], *words[3:]] if words[1:2] == ["-n"] else words  # kubectl -n NAME verb
    plain = [word for word in verb if not word.startswith("-")]
    name = next((known for known in KNOWN if plain[: len(known.split())] == known.split()), None)
    assert name is not None, f"unknown command: {' '.join(words)}"
    return name


def _curl(words: list[str]) -> str:
    url = next(word for word in words if re.match("https?://", word))
    assert "/" + url.partition("//")[2].partition("/")[2] in ROUTES, url
    assert ("--cacert" in words) == url.startswith("https:")
    if "-d" in words:
        assert {*json.loads(words[words.index("-d") + 1])} <= FIELDS
        assert words[words.index("-H") + 1] == "Content-Type: application/json"
    return "route and fields"


def _aws(name: str, words: list[str]) -> str:
    if name == "aws ec2 run-instances":
        assert "HttpTokens=required" in words  # the seed's "V2 only"
    return "values by pattern" if _look_right(words) else ""


def _look_right(words: list[str]) -> bool:
    patterns = {
        "--image-id": r"ami-[0-9a-f]{17}",
        "--instance-ids": r"i-[0-9a-f]{17}",
        "--instance-type": r"trn[12]\.\d*xlarge",
    }
    for flag, pattern in patterns.items():
        assert all(re.fullmatch(pattern, value) for value in values(words, flag)), flag
    for url in (word for word in words if word.startswith("s3:")):
        assert url.startswith("s3://tandem-artifacts"), url
    return True


REGISTRY = "123456789012.dkr.ecr.us-west-2.amazonaws.com"


def _docker(name: str, words: list[str]) -> str:
    if name == "docker run":
        assert all(device.startswith("/dev/neuron") for device in values(words, "--device"))
        return "devices, image and our own flags"
    if name == "docker login":
        assert words[-1] == REGISTRY
        return "registry of the manifests"
    if name in ("docker tag", "docker push"):
        used = {each["image"] for folder in FOLDERS for each in containers(objects(folder))}
        assert words[-1] in used, words[-1]
        return "an image that manifests use"
    (file,), (stage,), (tag,) = (values(words, flag) for flag in ("-f", "--target", "-t"))
    assert re.search(rf"^FROM \S+ AS {stage}$", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE), stage
    assert tag in (ROOT / file).read_text(encoding="utf-8"), tag
    assert (ROOT / words[-1]).is_dir()
    return "file, stage and tag exist; its pip steps are built by `make images`"


def _pip(name: str, words: list[str]) -> str:
    for file in (*values(words, "-r"), *values(words, "-c")):
        for line in (ROOT / file).read_text(encoding="utf-8").splitlines():
            if line and line[0] not in "#-":
                Requirement(line)
    assert "." not in words or (ROOT / "pyproject.toml").is_file()
    return "requirements parse; installed by `make images`"


def _hf(name: str, words: list[str]) -> str:
    (repository,) = (word for word in words[2:] if word not in ("--local-dir", *values(words, "--local-dir")))
    assert re.fullmatch(r"[\w-]+/[\w.-]+", repository), repository
    return "repository and folder by pattern"


def _sh(name: str, words: list[str]) -> str:
    assert (ROOT / words[1]).is_file(), words[1]
    return "a script of the repository"


def _eksctl(name: str, words: list[str]) -> str:
    for file in values(words, "-f"):
        cluster = yaml.safe_load((ROOT / file).read_text(encoding="utf-8"))
        assert cluster["kind"] == "ClusterConfig"
        return "its file is there (tests/deploy/test_cluster.py)"
    return "flags alone"


def _source(name: str, words: list[str]) -> str:
    assert words[1] in ENVIRONMENTS
    return "the environment that docs/trainium-nxdi.md names"


def _kubectl(name: str, words: list[str]) -> str:
    for timeout in values(words, "--timeout"):
        assert re.fullmatch(r"\d+[smh]", timeout), timeout
    if folders := values(words, "-k"):
        for folder in folders:
            assert build(ROOT / folder), folder
        return "the folder builds"
    if name == "kubectl label namespace":
        policies = str([each for folder in FOLDERS for each in objects(folder) if each["kind"] == "NetworkPolicy"])
        label, _, value = words[-1].partition("=")
        assert repr({label: value}) in policies, f"no policy asks for {words[-1]}"
        return "a network policy asks for the label"
    if name == "kubectl create configmap":
        wanted, (file,) = words[words.index("configmap") + 1], values(words, "--from-file")
        assert file == "secrets/tls/ca.crt" and f"'{wanted}'" in str([objects(folder) for folder in FOLDERS])
        return "a name that a manifest has, of a file that `sh deploy/secrets.sh` writes"
    if name == "kubectl create secret generic":
        return f"{len(_secret(words))} files that `sh deploy/secrets.sh` writes"
    if name == "kubectl get":
        assert words[-1] == "nodes"
        return "a kind that every cluster has"
    if name == "kubectl port-forward":
        words = words[:-1]
    kind, wanted = _object(words)
    found = [o for folder in FOLDERS for o in objects(folder) if _same(o, kind, wanted, values(words, "-n"))]
    assert found, f"no overlay has {kind} {wanted}"
    for patch in values(words, "-p"):
        assert values(words, "--type") == ["merge"]
        for each in found:
            valid(_merged(each, json.loads(patch)))
        return "its object exists and is valid when patched"
    return "its object exists"


def _secret(words: list[str]) -> list[str]:
    """The files of a secret: each that a manifest's command reads from where the secret is mounted."""
    name, (folder,) = words[words.index("generic") + 1], values(words, "--from-file")
    mount = f"/{folder.rpartition('/')[2]}/"
    arguments = [word for each in FOLDERS for pod in containers(objects(each)) for word in pod.get("args", ())]
    read = {word.rpartition("/")[2] for word in arguments if f"={mount}" in word}
    written = (ROOT / "deploy" / "secrets.sh").read_text(encoding="utf-8")
    assert name == f"tandem-{mount.strip('/')}" and read and all(file in written for file in read), (name, read)
    return sorted(read)


def _object(words: list[str]) -> tuple[str, str]:
    """The kind and name that a command ends with: `job/compile`, or `job compile`."""
    plain = [word for word in words if not word.startswith("-") and word not in values(words, "-n")]
    plain = [word for word in plain if word not in (*values(words, "--type"), *values(words, "-p"))]
    slashed = next((word for word in plain if "/" in word), None)
    kind, _, name = slashed.partition("/") if slashed else (plain[-2], "", plain[-1])
    return kind, name


def _same(each: dict[str, Any], kind: str, name: str, namespaces: list[str]) -> bool:
    where = each["metadata"].get("namespace")
    return each["kind"].lower() == kind and each["metadata"]["name"] == name and [where] == (namespaces or [None])


def _merged(each: Any, patch: Any) -> Any:
    """RFC 7396."""
    if not isinstance(patch, dict):
        return patch
    base = dict(each) if isinstance(each, dict) else {}
    return base | {key: _merged(base.get(key), value) for key, value in patch.items()}


MORE: dict[str, Callable[[str, list[str]], str]] = {
    "aws": _aws,
    "docker": _docker,
    "eksctl": _eksctl,
    "hf": _hf,
    "kubectl": _kubectl,
    "pip": _pip,
    "sh": _sh,
    "source": _source,
}
