"""Every server command of every overlay is started on the toy runner, with its image's packages, ports, TLS, tokens.

Here packages that an image lacks are hidden; `make images` (test_images.py) installs each image's own.
"""

from __future__ import annotations

import contextlib
import json
import ssl
import sys
import urllib.request
from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2

from tests.deploy import in_image
from tests.deploy.starting import (
    SERVICES,
    Container,
    free_ports,
    health,
    make_secrets,
    on_toy,
    servers,
    started,
    tokens_of,
)
from tests.support import REPOSITORY

SERVERS = servers()
ASKED = json.dumps({"prompt": "abab", "max_tokens": 4, "temperature": 0}).encode()


@pytest.fixture(scope="module")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_secrets(tmp_path_factory.mktemp("secrets"))


def hidden(image: str, arguments: list[str]) -> list[str]:
    """What runs main.py with an image's packages."""
    return [sys.executable, "-m", "tests.deploy.in_image", image, *arguments]


def through(door: str, secrets: Path | None) -> bytes:
    """What an OpenAI client gets there, with TLS and a key if there are secrets; then the page of metrics."""
    trusted = ssl.create_default_context(cafile=f"{secrets}/tls/ca.crt") if secrets else None
    key = {"authorization": f"Bearer {(secrets / 'tokens' / 'comparison').read_text().strip()}"} if secrets else {}
    asked = urllib.request.Request(f"{door}/v1/completions", ASKED, {"content-type": "application/json", **key})
    with urllib.request.urlopen(asked, timeout=30, context=trusted) as answer:
        assert json.load(answer)["usage"]["completion_tokens"] == 4
    scraped = urllib.request.Request(f"{door}/metrics", headers=key)
    with urllib.request.urlopen(scraped, timeout=10, context=trusted) as page:
        return bytes(page.read())


@pytest.mark.thorough
@pytest.mark.timeout(200)
@pytest.mark.parametrize("container", SERVERS, ids=lambda each: f"{each.overlay}-{each.arguments[0]}")
def test_a_server_of_an_overlay_starts_with_what_its_image_has(
    container: Container, secrets: Path, tmp_path: Path
) -> None:
    service, ports, target = SERVICES[container.flags["role"]], free_ports(container), None
    with contextlib.ExitStack() as stack:
        if container.flags["role"] == "draft_worker":
            own = next(each for each in SERVERS if each.flags["role"] == "target")
            others = free_ports(own)
            target = others["port"]
            words = hidden(own.image, on_toy(own, secrets, others))
            stack.enter_context(started(words, tmp_path / "target", REPOSITORY))
        words = hidden(container.image, on_toy(container, secrets, ports, target))
        log = stack.enter_context(started(words, tmp_path / "server", REPOSITORY))
        guarded = secrets if "tls_cert" in container.flags else None
        assert len(tokens_of(ports["port"], service, guarded)) == 12
        if "http_port" in ports:
            door = f"{'https' if guarded else 'http'}://localhost:{ports['http_port']}"
            assert b"vllm:generation_tokens_total" in through(door, guarded)
        assert health(ports["health_port"], f"tandem.v1.{service}") == health_pb2.HealthCheckResponse.SERVING
        with urllib.request.urlopen(f"http://127.0.0.1:{ports['metrics_port']}/metrics", timeout=10) as page:
            assert b"vllm:generation_tokens_total" in page.read()
        assert all(json.loads(entry) for entry in log.read_text().splitlines() if entry.startswith("{"))


def test_a_package_that_an_image_lacks_is_missed() -> None:
    """As prometheus-client was, and every server pod exited with 2."""
    present = in_image.closure([*in_image.BASES["nxdi"], *in_image.installs("nxdi")])
    assert {"grpcio", "prometheus-client", "protobuf", "torch", "transformers"} <= present
    assert not {"pytest", "ray"} & present


@pytest.mark.parametrize("image", ["torchneuron", "nxdi"])
def test_an_image_has_what_a_server_imports_for_openai_clients_and_structures(image: str) -> None:
    present = in_image.closure([*in_image.BASES[image], *in_image.installs(image)])
    assert {"httptools", "uvicorn", "llguidance"} <= present


@pytest.mark.parametrize("image", ["torchneuron", "nxdi"])
def test_an_image_has_what_a_comparison_job_imports(image: str) -> None:
    present = in_image.closure([*in_image.BASES[image], *in_image.installs(image)])
    assert {"jinja2", "matplotlib", "rich", "cryptography"} <= present
