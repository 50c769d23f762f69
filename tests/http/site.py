"""The door of a toy server in this process, and its clients."""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import httpx2
import openai

from tandem.engine.batcher import Batcher
from tandem.engine.engine import Engine
from tandem.engine.generator import RequestDefaults
from tandem.engine.generators import fused_generator
from tandem.engine.load_models import Loaded
from tandem.engine.model_config import DraftChoice
from tandem.engine.structures import Structures
from tandem.services.generation import GenerateMethod
from tandem.services.health import SERVING, HealthService
from tandem.services.http.app import HttpPort
from tandem.services.http.service import HttpService
from tandem.services.observability.request_log import RequestLog
from tandem.services.security.access import Security
from tandem.services.server import HttpAddress
from tandem.services.shutdown import Lifecycle
from tandem.v1.fused_speculative_server_pb2 import FusedSpeculativeServerGenerateResponse
from tests.support import HANG, run, toy
from tests.toy import VOCAB_SIZE, ToyConfig, ToyRunner, ToyTokenizer

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "hello"}]
LENGTH = 512
KEY = "a-key-of-a-test-1"


@dataclass
class Site:
    url: str
    http: httpx2.AsyncClient
    client: openai.AsyncOpenAI
    engine: Engine
    lifecycle: Lifecycle
    generate: GenerateMethod
    door: HttpPort
    health: HealthService = field(default_factory=HealthService)

    async def post(self, path: str, body: Mapping[str, Any] | bytes, **headers: str) -> httpx2.Response:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await self.http.post(path, content=data, headers={"content-type": "application/json", **headers})

    async def completion(self, **body: Any) -> Any:
        """The answer to a request that is served."""
        answer = await self.post(COMPLETIONS, {"prompt": "hello", "max_tokens": 12, "temperature": 0, **body})
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def chat(self, **body: Any) -> Any:
        answer = await self.post(CHAT, {"messages": HELLO, "max_tokens": 12, "temperature": 0, **body})
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def text(self, **body: Any) -> str:
        return str((await self.completion(**body))["choices"][0]["text"])

    async def refused(self, path: str, body: Mapping[str, Any] | bytes, status: int = 400, **headers: str) -> Any:
        """The error of a request that is refused."""
        answer = await self.post(path, body, **headers)
        assert answer.status_code == status, answer.text
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"} and error["message"]
        return error

    async def events(self, path: str, body: Mapping[str, Any]) -> list[Any]:
        """The messages of a stream, which must have ended as streams do."""
        answer = await self.post(path, {"temperature": 0, **body, "stream": True})
        assert answer.headers["content-type"].startswith("text/event-stream"), answer.text
        *told, done, rest = answer.text.split("\n\n")
        assert (done, rest) == ("data: [DONE]", "")
        return [json.loads(each.removeprefix("data: ")) for each in told]


@contextlib.asynccontextmanager
async def door(
    config: ToyConfig | None = None,
    *,
    slots: int = 4,
    queue: int | None = None,
    drafts: bool = True,
    security: Security | None = None,
    defaults: RequestDefaults | None = None,
    kind: type[ToyRunner] = ToyRunner,
    adapters: Mapping[str, str] | None = None,
    length: int = LENGTH,
) -> AsyncIterator[Site]:
    """A fused server's door; it drafts with a toy model if `drafts`, else by lookup."""
    security, batcher, lifecycle = security or Security(), Batcher("test-door"), Lifecycle()
    engine = Engine(
        toy(config, slots=slots, max_length=length, kind=kind),
        batcher,
        structures=Structures(ToyTokenizer(), VOCAB_SIZE),
    )
    draft = (
        Loaded(Engine(toy(config, slots=slots, max_length=length), batcher, vital=False), ToyTokenizer())
        if drafts
        else None
    )
    generator = fused_generator(Loaded(engine, ToyTokenizer()), draft, 3, DraftChoice("model" if drafts else "ngram"))
    generator = replace(generator, defaults=defaults or generator.defaults)
    generate = GenerateMethod(
        generator, FusedSpeculativeServerGenerateResponse, lifecycle, None, queue, limits=security.limits
    )
    service = HttpService(generate, lambda: adapters or {}, security.max_message_bytes)
    health = HealthService()
    health.set(SERVING, "")
    opened = HttpPort(HttpAddress(0, "127.0.0.1"), security, [RequestLog("test")], grpc_port=4242)
    await opened.start(service, health)
    try:
        async with httpx2.AsyncClient(base_url=opened.url, timeout=HANG) as http:
            client = openai.AsyncOpenAI(base_url=f"{opened.url}/v1", api_key=KEY, timeout=HANG, max_retries=0)
            async with client:
                yield Site(opened.url, http, client, engine, lifecycle, generate, opened, health)
    finally:
        await opened.stop()
        await batcher.close()


def at_door(*given: Any, **options: Any) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Runs a test, whose first argument is the site, at a door of its own."""

    def wrap(test: Callable[..., Any]) -> Callable[..., None]:
        @functools.wraps(test)
        def made(**values: Any) -> None:
            async def inside() -> None:
                async with door(*given, **options) as site:
                    await test(site, **values)

            run(inside())

        _, *rest = inspect.signature(test).parameters.values()
        made.__signature__ = inspect.Signature(rest)  # type: ignore[attr-defined]
        return made

    return wrap
