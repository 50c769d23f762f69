"""A worker of NVIDIA Dynamo (1.6) that asks a Tandem server: Dynamo's frontend tokenizes, Tandem decodes.

    python deploy/dynamo/tandem_worker.py --server HOST:50051 --model DIR --served_model_name NAME

It needs ai-dynamo and Tandem's client, and no device. TLS and a token: --tls_ca, --token_file.
"""

from __future__ import annotations

import argparse
import secrets
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from tandem import AsyncClient, Credentials, SamplingParams

SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "seed"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)
"""Fields of Dynamo's sampling options that Tandem has under the same names."""
HERE = ("max_tokens", "ignore_eos")
FRONTEND = ("stop", "stop_token_ids_hidden", "stop_token_ids", "skip_special_tokens", "max_thinking_tokens")
"""Fields that Dynamo's frontend applies itself to what comes back."""
NEUTRAL = (None, False, [], {}, "")
ONE = ("n", "best_of", "length_penalty")
"""Fields that ask for nothing while they are 1."""


def unserved(request: Mapping[str, Any]) -> list[str]:
    """Names of options that ask for what this worker does not do; they are refused rather than dropped."""
    found = []
    for group in ("sampling_options", "stop_conditions", "output_options"):
        for name, value in (request.get(group) or {}).items():
            plain = value in NEUTRAL or (name in ONE and value == 1) or (name == "min_tokens" and value == 0)
            if not plain and name not in (*SAMPLING, *HERE, *FRONTEND):
                found.append(name)
    return found


def sampling_of(options: Mapping[str, Any]) -> SamplingParams:
    """What is absent is greedy; a draw without a seed gets a new one. Dynamo's top_k of -1 is Tandem's 0: all."""
    given = {name: options[name] for name in SAMPLING if options.get(name) is not None}
    given["top_k"] = max(0, given.get("top_k", 0))
    if given.get("temperature", 0.0) > 0:
        given.setdefault("seed", secrets.randbits(63))
    return SamplingParams(**given)


async def answered(client: AsyncClient, request: Mapping[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
    """The chunks of Dynamo's contract for one request. Leaving early cancels the request and frees its slot."""
    stop, tokens = request.get("stop_conditions") or {}, list(request["token_ids"])
    sampling = sampling_of(request.get("sampling_options") or {})
    most, count = stop.get("max_tokens"), 0
    options: dict[str, Any] = {"max_new_tokens": most, "ignore_end_of_sequence": bool(stop.get("ignore_eos"))}
    async with aclosing(client.stream(tokens, sampling, **options)) as chunks:
        async for chunk in chunks:
            count += len(chunk.token_ids)
            yield {"token_ids": list(chunk.token_ids), "index": 0}
    used = {"prompt_tokens": len(tokens), "completion_tokens": count, "total_tokens": len(tokens) + count}
    yield {
        "token_ids": [],
        "index": 0,
        "finish_reason": "length" if count == most else "stop",
        "completion_usage": used,
    }


def main() -> None:
    from dynamo.common.backend import EngineConfig, LLMEngine, LlmRegistration, WorkerConfig  # type: ignore[import-not-found]
    from dynamo.common.backend.run import run  # type: ignore[import-not-found]
    from dynamo.llm.exceptions import InvalidArgument  # type: ignore[import-not-found]

    class Tandem(LLMEngine):  # type: ignore[misc]
        """One Tandem server (or several of one model, HOST:PORT,HOST:PORT) as an engine."""

        def __init__(self, args: argparse.Namespace) -> None:
            self.args = args
            self.client: AsyncClient | None = None

        @classmethod
        async def from_args(cls, argv: list[str] | None = None) -> tuple[Tandem, Any]:
            args = arguments().parse_args(argv)
            return cls(args), WorkerConfig(
                namespace=args.namespace,
                component="tandem",
                model_name=args.model,
                served_model_name=args.served_model_name,
                discovery_backend=args.discovery_backend,
                enable_kv_routing=False,
            )

        async def start(self, worker_id: int) -> Any:
            credentials = Credentials(ca=self.args.tls_ca, token_file=self.args.token_file)
            self.client = AsyncClient(self.args.server.split(","), credentials=credentials, wait_seconds=10800)
            info = await self.client.model_info()
            return EngineConfig(
                model=self.args.model,
                served_model_name=self.args.served_model_name,
                llm=LlmRegistration(context_length=info.max_sequence_length),
            )

        async def generate(self, request: Any, context: Any) -> AsyncGenerator[dict[str, Any], None]:
            assert self.client is not None
            if names := unserved(request):
                raise InvalidArgument(f"not served by Tandem's worker: {', '.join(names)}")
            async with aclosing(answered(self.client, request)) as chunks:
                async for chunk in chunks:
                    if context.is_stopped():
                        return
                    yield chunk

        async def cleanup(self) -> None:
            if self.client is not None:
                await self.client.close()

    run(Tandem)


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Serves a Tandem server's model as a worker of NVIDIA Dynamo.")
    parser.add_argument("--server", required=True, help="HOST:PORT of a Tandem server; several with commas")
    parser.add_argument("--model", required=True, help="folder or hub id: its tokenizer and chat template")
    parser.add_argument("--served_model_name", help="the model's name for clients")
    parser.add_argument("--namespace", default="dynamo")
    parser.add_argument("--discovery_backend", default="etcd", help="kubernetes, etcd, file")
    parser.add_argument("--tls_ca", help="certificate of the authority that signed the server's")
    parser.add_argument("--token_file", help="file with this worker's token")
    return parser


if __name__ == "__main__":
    main()
