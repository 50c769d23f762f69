"""Each image's environment, and every container of every overlay that runs in one, started there: `make images`.

An environment has what the pip steps of its stage of deploy/Dockerfile install, run beside a copy of the files that the
stage copies; AWS's packages are empty wheels of AWS's names, versions and requirements. As they stand, TorchNeuron's
commands must refuse for lack of a device. Then what computes on one is replaced: `--device=cpu` and 2 processes under
torchrun, the stand-in of tests/runners/nxdi for NxD Inference; and models by small ones (tests/pages/models.py).

The steps download some hundred megabytes.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import shlex
import shutil
import ssl
import subprocess
import time
import urllib.request
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tandem.launch import free_port
from tests.deploy.manifests import OVERLAYS, ROOT, filled, flags, objects, of_kind, pods, valid, values_of
from tests.packaging import environments
from tests.pages import models
from tests.pages.machine import serves
from tests.pages.recipe import STAND_IN
from tests.support import run_here

pytestmark = [pytest.mark.images, pytest.mark.timeout(1800)]
TORCH = "torch==2.13.0"  # in place of AWS's 2.14 and 2.9, of which the index has no build for a CPU
NEURON: dict[str, dict[str, tuple[str, ...]]] = {  # AWS's packages of each image, and what they require
    "torchneuron": {"torch-neuronx==2.14.3.0.1": (TORCH,), "neuronx-cc==2.28.7631.0": (), "nki==0.7.0": ()},
    "nxdi": {
        "torch-neuronx==2.9.0.2.15.32035": (TORCH,),
        "libneuronxla==2.2.1": (),
        "neuronx-cc==2.26.6360.0": (),
        "nki==0.5.0": (),
        "neuronx-distributed==0.19.28492": ("safetensors", "setuptools>=70.1"),
        "neuronx-distributed-inference==0.10.18399": ("transformers==4.57.*", "sentencepiece", "neuronx-distributed"),
    },
}
TWO = {"--nproc-per-node": "2", "--tp_degree": "2"}
SHORT = {"--max-new-tokens": "8", "--mean-output-tokens": "8", "--num-runs": "1"}
PORTS = ("port", "health_port", "metrics_port", "http_port")


def steps(name: str) -> list[list[str]]:
    """The words of each `pip install` of a stage, without AWS's index."""
    text = (ROOT / "deploy" / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    stage = re.split(rf"^FROM \S+ AS {name}\n", text, flags=re.MULTILINE)[1].partition("\nFROM ")[0]
    found = re.findall(r"pip install (.*?)(?=&&|$)", stage, re.MULTILINE)
    return [shlex.split(re.sub(r"--(index-strategy|extra-index-url) \S+|--no-cache-dir", "", each)) for each in found]


def write_wheel(folder: Path, pin: str, requires: Sequence[str]) -> None:
    name, _, version = pin.partition("==")
    module, lines = name.replace("-", "_"), "".join(f"Requires-Dist: {line}\n" for line in requires)
    info = f"{module}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{module}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{module}/__init__.py", "")
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{lines}")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")


def listed(*words: str | Path) -> set[str]:
    return set(subprocess.check_output(["git", "ls-files", *words], cwd=ROOT, text=True).splitlines())


class Image:
    """An environment made below `folder`, beside what `COPY . .` copies of the checkout."""

    def __init__(self, name: str, folder: Path) -> None:
        self.code, self.bin, self.pytest = folder / "tandem", folder / "venv" / "bin", folder / "pytest"
        for file in listed() - listed("-c", "-i", "-X", ROOT / "deploy" / "Dockerfile.dockerignore"):
            (self.code / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / file, self.code / file, follow_symlinks=False)
        (wheels := folder / "wheels").mkdir()
        for pin, requires in NEURON[name].items():
            write_wheel(wheels, pin, requires)
        environments.environment(folder / "venv")
        base = [list(NEURON[name])] if name == "nxdi" else []  # AWS's own image has them
        stand_in = ["--no-deps", "--target", str(self.pytest), "pytest", "iniconfig", "pluggy"]  # what it imports
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(self.code)
            for step in (*base, *steps(name), stand_in):
                environments.pip(self.bin / "python", "install", "--quiet", "--find-links", wheels, *step)


Images = Callable[[str], Image]


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Images]:
    folder = tmp_path_factory.mktemp("images")
    yield functools.cache(lambda name: Image(name, folder / name))
    shutil.rmtree(folder)


def image_of(container: Any) -> str:
    return str(container["image"].rpartition(":")[2].partition("-")[0])


def containers(overlay: str, kind: str) -> list[tuple[str, Any]]:
    """Those of images of ours, and their pods' names, in the order in which a kubelet starts them."""
    specs = [(name, pods(overlay)[name]["spec"]) for name in of_kind(overlay, kind)]
    every = [(name, each) for name, spec in specs for each in (*spec.get("initContainers", ()), *spec["containers"])]
    return [(name, each) for name, each in every if image_of(each) in NEURON]


class Cluster:
    """Runs containers of an overlay as processes. What a pod has below / they have below `folder`."""

    def __init__(self, overlay: str, images: Images, folder: Path) -> None:
        self.values, self.images, self.folder = values_of(overlay), images, folder
        self.ports = {
            name: {f"--{flag}": str(free_port()) for flag in PORTS if flag in flags(each)}
            for name, each in containers(overlay, "StatefulSet")
            if "ports" in each
        }
        subprocess.run(["sh", ROOT / "deploy" / "secrets.sh", folder], check=True, timeout=60)
        for name in ("results", "cache/compiled", "artifacts/compiled", "artifacts/models", "tmp", "site"):
            (folder / name).mkdir(parents=True)
        (folder / "site" / "sitecustomize.py").write_text(STAND_IN.format(root=str(ROOT)))

    def words(self, container: Any, replaced: Mapping[str, str]) -> list[str]:
        """A command as it is here. `replaced`: values of flags; an empty one takes the flag away."""
        found: list[str] = []
        for word in (*container["command"], *container["args"]):
            flag, _, value = filled(word, self.values).partition("=")
            word = f"{flag}={replaced.get(flag, value)}" if value else flag
            word = word.replace("/opt/tandem", str(self.images(image_of(container)).code)).replace(
                "0.0.0.0", "127.0.0.1"
            )
            word = re.sub(r"(\w+)\.tandem\.svc:50051", lambda m: f"127.0.0.1:{self.ports[m[1]]['--port']}", word)
            word = re.sub(r"(?<![\w.])/(artifacts|cache|results|tls|tokens)\b", rf"{self.folder}/\1", word)
            found += [word] if replaced.get(flag) != "" else []
        for name in re.findall(r"/artifacts/models/([\w.-]+)", " ".join(found)):
            self.write(self.folder / "artifacts" / "models" / name)
        return found

    def write(self, model: Path) -> None:
        """A small model; one in Neuron's FP8 is converted, as the recipe says."""
        if model.name.endswith("-FP8") and not model.exists():
            given = models.write(model.with_name(model.name.replace("-FP8", "-Instruct-FP8")))
            words = ("--role", "convert", "--convert", "fp8", "--model", str(given), "--output", str(model))
            assert run_here(self.folder, *words).returncode == 0
        models.write(model)

    @contextlib.contextmanager
    def started(self, container: Any, replaced: Mapping[str, str]) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
        """The process and its log."""
        image, home = self.images(image_of(container)), self.folder / "tmp"
        program, *rest = self.words(container, replaced)
        own = {each["name"]: each["value"] for each in container.get("env", ())} | {"HF_HUB_OFFLINE": "1"}
        own |= {"PATH": f"{image.bin}:{os.environ['PATH']}", "HOME": str(home), "TANDEM_CACHE": str(home / "tandem")}
        if image_of(container) == "nxdi":
            own["PYTHONPATH"] = f"{self.folder / 'site'}:{image.pytest}"
        log, words = home / f"log-{len(list(home.iterdir()))}", [str(shutil.which(program, path=own["PATH"])), *rest]
        with log.open("wb") as output:
            process = subprocess.Popen(words, cwd=image.code, env=own, stdout=output, stderr=output)
        try:
            yield process, log
        finally:
            process.kill()
            process.wait()

    def run(self, container: Any, replaced: Mapping[str, str]) -> tuple[int, str]:
        """The exit code, and what it printed."""
        with self.started(container, replaced) as (process, log):
            return process.wait(300), log.read_text()

    @contextlib.contextmanager
    def serving(self, name: str, container: Any) -> Iterator[None]:
        """Until its startup probe and its metrics answer. It must end by itself after SIGTERM."""
        ports, replaced, torchrun = self.ports[name], dict[str, str](), container["command"][0] == "torchrun"
        if image_of(container) == "torchneuron":
            replaced = {"--device": "cpu", "--compiled_dir": ""} | (TWO if torchrun else {})  # no graphs there
        with self.started(container, replaced | ports) as (process, log):
            give_up = time.monotonic() + 300
            while not serves(int(ports["--health_port"]), container["startupProbe"]["grpc"]["service"]):
                assert process.poll() is None and time.monotonic() < give_up, log.read_text()
                time.sleep(0.1)
            with urllib.request.urlopen(f"http://127.0.0.1:{ports['--metrics_port']}/metrics", timeout=10) as page:
                assert b"vllm:generation_tokens_total" in page.read()
            yield
            process.terminate()
            assert process.wait(60) == int(torchrun), log.read_text()  # torchrun's code for a signal that was obeyed
            assert '"message": "stopped"' in log.read_text()

    def completes(self, port: str) -> None:
        """Fails unless an OpenAI client with a token gets tokens over HTTPS."""
        headers = {"authorization": f"Bearer {(self.folder / 'tokens' / 'comparison').read_text().strip()}"}
        body = json.dumps({"prompt": "abab", "max_tokens": 4, "ignore_eos": True}).encode()
        asked = urllib.request.Request(f"https://127.0.0.1:{port}/v1/completions", body, headers)
        asked.add_header("content-type", "application/json")
        trusted = ssl.create_default_context(cafile=self.folder / "tls" / "ca.crt")
        with urllib.request.urlopen(asked, timeout=60, context=trusted) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize("name", NEURON)
def test_an_images_packages_agree_and_doctor_knows_them(name: str, images: Images, tmp_path: Path) -> None:
    python = images(name).bin / "python"
    environments.pip(python, "check")
    said = environments.run(python, images(name).code, "main.py", "--role", "doctor", HOME=str(tmp_path))
    assert "torch-neuronx" in said.stdout and "placeholder" not in said.stdout, said.stderr


# `apart` has the commands of same-node, and so has vllm-neuron but for its own image, which is AWS's.
@pytest.mark.parametrize("overlay", [f"overlays/{name}" for name in OVERLAYS if name not in ("apart", "vllm-neuron")])
def test_an_overlays_containers_start_in_their_images(overlay: str, images: Images, tmp_path: Path) -> None:
    for each in objects(overlay):
        valid(each)  # by the API server's schemas
    cluster, servers = Cluster(overlay, images, tmp_path), containers(overlay, "StatefulSet")
    for _, container in (*servers, *containers(overlay, "Job")):
        if "--device=neuron" in container["args"]:
            code, said = cluster.run(container, TWO)
            assert code and "no /dev/neuron" in said, said
    with contextlib.ExitStack() as stack:
        for name, container in sorted(servers, key=lambda each: each[0] != "target"):  # the draft calls the target
            if "ports" in container:
                stack.enter_context(cluster.serving(name, container))
            else:
                assert cluster.run(container, {})[0] == 0
        for ports in cluster.ports.values():
            if "--http_port" in ports:
                cluster.completes(ports["--http_port"])
        for _, container in containers(overlay, "Job"):
            if "--device=neuron" not in container["args"]:
                code, said = cluster.run(container, SHORT)
                assert code == 0, said
                if "--output-dir=/results" in container["args"]:
                    (report,) = (tmp_path / "results").rglob("comparison.json")
                    assert set(flags(container)["architectures"].split(",")) <= set(
                        re.findall(r"\w+", report.read_text())
                    )
