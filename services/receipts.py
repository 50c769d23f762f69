"""Signs receipts of generations that ask for one."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, field, replace

import tandem
from tandem.clients.other_engine import OtherEngine
from tandem.engine.generator import Generator, check_tokens
from tandem.receipts.keys import Keys
from tandem.receipts.receipt import (
    SALT_BYTES,
    Receipt,
    Served,
    SignedModel,
    SignedRequest,
    VerifiedAt,
    prefix_digests,
    prompt_digest,
)
from tandem.runners.native.compilation import cpu_model
from tandem.speculation.errors import TandemError
from tandem.speculation.types import (
    Chunk,
    GenerationEnd,
    GenerationRequest,
    InvalidField,
    ModelInfo,
    SpeculationStats,
    TokenLogprobs,
)

log = logging.getLogger("tandem.server")


@dataclass(frozen=True, slots=True)
class Receipts:
    """`adapters()`: the adapters loaded now."""

    keys: Keys
    service: str
    adapters: Callable[[], Mapping[str, str]]
    processor: str = field(default_factory=lambda: cpu_model().partition(":")[2].strip())

    async def generate(
        self, generator: Generator, request: GenerationRequest, stats: SpeculationStats
    ) -> AsyncGenerator[Chunk | GenerationEnd, None]:
        prompt, request = await resolved(generator, request)
        tokens, logprobs, revision = list[int](), list[TokenLogprobs](), ""
        async with contextlib.aclosing(generator.generate(request, stats)) as events:
            async for event in events:
                if isinstance(event, Chunk):
                    if not tokens:  # now the adapter is in use, and cannot be replaced
                        revision = self.adapters().get(request.adapter, "")
                    tokens += event.token_ids
                    logprobs += event.logprobs
                    yield event
                    continue
                salt = os.urandom(SALT_BYTES)
                digest = prompt_digest(salt, prompt)
                elsewhere = next((each for _, _, each in event.stats.verifiers if each), "")
                receipt = Receipt(
                    model=SignedModel.from_info(generator.info),
                    adapter=(request.adapter, elsewhere or revision) if request.adapter else None,
                    request=_signed(request, generator.info),
                    prompt_tokens=len(prompt),
                    prompt_digest=digest,
                    token_ids=tuple(tokens),
                    finish_reason=event.finish_reason,
                    digests=prefix_digests(digest, tokens),
                    logprobs=tuple(logprobs),
                    served=self._served(generator.info, event.stats),
                    key=self.keys.public,
                )
                yield replace(event, receipt=self.keys.signed(receipt, salt).text)

    def _served(self, info: ModelInfo, stats: SpeculationStats) -> Served:
        return Served(
            service=self.service,
            tandem=tandem.__version__,
            time=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            processor=self.processor,
            backend=info.backend,
            device=info.device,
            arithmetic=info.arithmetic,
            bit_exact=info.bit_exact,
            drafts=_without_address(info.draft_name),
            rounds=stats.rounds,
            drafted_by=dict(stats.drafted_by),
            accepted_by=dict(stats.accepted_by),
            verifiers=tuple(dict.fromkeys(VerifiedAt(key, arithmetic) for key, arithmetic, _ in stats.verifiers)),
        )


def _signed(request: GenerationRequest, info: ModelInfo) -> SignedRequest:
    assert request.max_new_tokens is not None, "it is resolved"
    return SignedRequest(
        request.sampling,
        request.max_new_tokens,
        end_of_sequence_ids=() if request.ignore_end_of_sequence else info.end_of_sequence_ids,
        stop_token_ids=request.stop_token_ids,
        stop_strings=request.stop_strings,
        logprobs=request.logprobs,
    )


def generated(
    receipts: Receipts | None, generator: Generator, request: GenerationRequest, stats: SpeculationStats
) -> AsyncGenerator[Chunk | GenerationEnd, None]:
    """Yields a generation's events, with a receipt if requested. Raises InvalidField without keys."""
    if not request.receipt:
        return generator.generate(request, stats)
    if receipts is None:
        raise InvalidField("receipt", "this server signs none: it was started without --receipt_keys")
    return receipts.generate(generator, request, stats)


async def resolved(generator: Generator, request: GenerationRequest) -> tuple[tuple[int, ...], GenerationRequest]:
    prompt = tuple(await generator.prompt_tokens(request))
    total = request.max_total_tokens or generator.info.max_sequence_length
    room = total - len(prompt)
    request = generator.defaults.complete(request, room)
    most = room if request.max_new_tokens is None else request.max_new_tokens
    return prompt, replace(
        request,
        text=None,
        messages=None,
        chat=False,
        token_ids=prompt,
        max_new_tokens=most if room > 0 else request.max_new_tokens,  # the generator says why there is no room
    )


async def written(
    engine: OtherEngine, generator: Generator, request: GenerationRequest
) -> tuple[GenerationRequest, str, str]:
    """Returns the request with the engine's answer as prediction, the answer's text, and why there is none."""
    _, request = await resolved(generator, request)
    try:
        ids, text = await engine.answer(request)
        check_tokens("engine", ids, generator.info.vocab_size)
    except TandemError as error:
        log.warning("the engine behind: %s; its answer is written here", error)
        return request, "", str(error)
    return replace(request, predicted=ids or await generator.predicted_tokens(text)), text, ""


def _without_address(draft: str) -> str:
    # Anybody may read receipts: leave out a worker's address.
    return "remote" if draft.startswith("remote:") and ":" in draft.removeprefix("remote:") else draft
