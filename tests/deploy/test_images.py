"""Each image's own environment: its pip steps installed, and every command of every overlay that runs in it started.

`make images`. Not in `make test`, because the steps download some hundred megabytes. TANDEM_IMAGES=DIR keeps the
environments there for the next run.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2

from tests.deploy import image_venv
from tests.deploy.image_venv import Image
from tests.deploy.manifests import OVERLAYS
from tests.deploy.starting import (
    SERVICES,
    Container,
    containers,
    free_ports,
    health,
    here,
    make_secrets,
    on_toy,
    servers,
    started,
    tokens_of,
)

pytestmark = [pytest.mark.images, pytest.mark.timeout(1800)]
JOBS = {each.arguments: each for o in OVERLAYS for each in containers(o, "Job") if "compare" in each.command[-1]}


class Images:
    """Builds each image's environment once, or finds it in the folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.built = folder, dict[str, Image]()

    def __getitem__(self, name: str) -> Image:
        if name not in self.built:
            self.built[name] = image_venv.find_or_build(name, self.folder / name)
        return self.built[name]

    def words(self, container: Container, arguments: list[str]) -> list[str]:
        """The container's command with its image's programs; under torchrun one process, which the toy runner is."""
        program, *rest = container.command
        rest = ["--nproc-per-node=1" if word.startswith("--nproc-per-node=") else word for word in rest]
        return [str(self[container.image].venv / "bin" / program), *rest, *arguments]


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Images]:
    if kept := os.environ.get("TANDEM_IMAGES"):
        yield Images(Path(kept))
        return
    folder = tmp_path_factory.mktemp("images")
    yield Images(folder)
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_secrets(tmp_path_factory.mktemp("secrets"))


class Pods:
    """Starts containers of an overlay, each on ports of its own, until the test ends."""

    def __init__(self, images: Images, secrets: Path, folder: Path, stack: contextlib.ExitStack) -> None:
        self.images, self.secrets, self.folder, self.stack = images, secrets, folder, stack
        self.ports: dict[str, dict[str, int]] = {}

    def start(self, container: Container) -> dict[str, int]:
        name, ports = container.flags["role"], free_ports(container)
        called = self.ports.get("target") if name == "draft_worker" else None
        arguments = on_toy(container, self.secrets, ports, called["port"] if called else None)
        image, words = self.images[container.image], self.images.words(container, arguments)
        home = self.folder / f"home-{name}"
        home.mkdir()
        self.stack.enter_context(started(words, self.folder / name, image.code, image.environment(home)))
        self.ports[name] = ports
        return ports


@pytest.fixture
def here_pods(images: Images, secrets: Path, tmp_path: Path) -> Iterator[Pods]:
    with contextlib.ExitStack() as stack:
        yield Pods(images, secrets, tmp_path, stack)


@pytest.mark.parametrize("name", ["torchneuron", "nxdi"])
def test_an_images_packages_agree_with_each_other(name: str, images: Images, tmp_path: Path) -> None:
    checked = images[name].run("pip", "check", home=tmp_path, check=False)
    assert checked.returncode == 0, checked.stdout
    assert "torch 2.13.0" in " ".join(images[name].run("pip", "list", home=tmp_path).stdout.split())


@pytest.mark.parametrize("name", ["torchneuron", "nxdi"])
def test_an_image_says_that_its_software_is_there(name: str, images: Images, tmp_path: Path) -> None:
    said = images[name].run("python", "main.py", "--role", "doctor", home=tmp_path, check=False)
    assert "torch-neuronx" in said.stdout, said.stderr
    assert "placeholder" not in said.stdout


@pytest.mark.parametrize("container", servers(), ids=lambda each: f"{each.overlay}-{each.workload}")
def test_a_server_of_an_overlay_starts_in_its_image(container: Container, here_pods: Pods, secrets: Path) -> None:
    if container.flags["role"] == "draft_worker":
        here_pods.start(next(each for each in servers() if each.flags["role"] == "target"))
    ports, service = here_pods.start(container), SERVICES[container.flags["role"]]
    assert len(tokens_of(ports["port"], service, secrets)) == 12
    assert health(ports["health_port"], f"tandem.v1.{service}") == health_pb2.HealthCheckResponse.SERVING
    url = f"http://127.0.0.1:{ports['metrics_port']}/metrics"
    page = subprocess.run(["curl", "-sS", "--fail", url], capture_output=True, text=True, check=True)
    assert "vllm:generation_tokens_total" in page.stdout


def test_the_port_for_openai_clients_answers_over_https_in_its_image(here_pods: Pods, secrets: Path) -> None:
    (container,) = containers("fused-openai", "StatefulSet")
    ports = here_pods.start(container)
    url = f"https://127.0.0.1:{ports['http_port']}/v1"
    body = {"model": "toy", "prompt": "What is machine learning?", "max_tokens": 8}
    words = ["curl", "-sS", "--cacert", str(secrets / "tls" / "ca.crt")]
    token = (secrets / "tokens" / "comparison").read_text().strip()
    typed = ["-H", "Content-Type: application/json", f"{url}/completions", "-d", json.dumps(body)]
    refused = subprocess.run([*words, "-w", "%{http_code}", "-o", "/dev/null", *typed], capture_output=True, text=True)
    assert refused.stdout == "401", refused.stderr
    asking = ["--fail-with-body", "-H", f"Authorization: Bearer {token}"]
    said = subprocess.run([*words, *asking, *typed], capture_output=True, text=True)
    assert said.returncode == 0, said.stdout + said.stderr
    assert json.loads(said.stdout)["usage"]["completion_tokens"] == 8


@pytest.mark.parametrize("job", JOBS.values(), ids=lambda each: each.overlay)
def test_a_comparison_job_writes_its_report_in_its_image(job: Container, here_pods: Pods, secrets: Path) -> None:
    for container in containers(job.overlay, "StatefulSet"):
        here_pods.start(container)
    role = {"target": "target", "draft": "draft_worker", "fused": "fused_target"}
    results = here_pods.folder / "results"
    words = here(job.arguments, secrets, {}, output_dir=str(results), max_new_tokens="8", num_runs="1")
    for service, its in role.items():
        if its in here_pods.ports:
            words = [
                w.replace(f"{service}.tandem.svc:50051", f"127.0.0.1:{here_pods.ports[its]['port']}") for w in words
            ]
    image = here_pods.images[job.image]
    program, *rest = here_pods.images.words(job, words)
    ran = subprocess.run(
        [program, *rest, "--prompts-per-workload=1"],
        cwd=image.code,
        env=image.environment(here_pods.folder),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ran.returncode == 0, ran.stderr
    (report,) = results.rglob("comparison.json")
    measured = report.read_text(encoding="utf-8")
    assert all(f'"{name}"' in measured for name in job.flags["architectures"].split(","))
    assert list(results.rglob("*.html"))
