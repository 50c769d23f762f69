"""Converts requests and replies of VllmEngine. Refuses by name what is not served: nothing is silently left out."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from tandem.engine.generator import RequestDefaults
from tandem.services.security.limits import ServerLimits, check_stops
from tandem.speculation.request import members
from tandem.speculation.types import (
    Chunk,
    FinishReason,
    GenerationEnd,
    GenerationRequest,
    InvalidField,
    SamplingParams,
    Structure,
    StructureKind,
    TokenLogprobs,
)

MAX_CHOICES = 128
_SEEDS = 2**64
_OURS = "x-tandem-"
EXTENSIONS = {f"{_OURS}drafts": "drafts"}
"""Options of a request that this protocol has no field for, by the key of the call's metadata that they come in."""
_NO_RECEIPT = "this protocol has no place for one; the server's own Generate and --http_port give receipts"
ANY_OBJECT = '{"type": "object"}'
_ALL_TOKENS = 2**32 - 1
"""What the gateway sends as `top_k` for a request without one."""

_NOT_SERVED: Mapping[str, Callable[[Any], bool]] = {
    "prompt_logprobs": lambda p: p.HasField("prompt_logprobs"),
    "min_tokens": lambda p: p.min_tokens > 0,
    "truncate_prompt_tokens": lambda p: p.HasField("truncate_prompt_tokens"),
    "structural_tag": lambda p: p.HasField("structural_tag"),
}
"""Fields of SamplingParams, each with whether a request uses it."""
_INPUTS_NOT_SERVED = (
    *("mm_inputs", "extra_mm_inputs", "media_refs"),
    *("kv_transfer_params", "kv_transfer_params_json", "data_parallel_rank"),
)


@dataclass(slots=True)
class Output:
    """What a choice has committed so far. `logprobs`: one per token, or none."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)

    def add(self, chunk: Chunk) -> None:
        self.token_ids += chunk.token_ids
        self.logprobs += chunk.logprobs


def requests_of(
    message: pb.GenerateRequest,
    limits: ServerLimits,
    longest: int,
    defaults: RequestDefaults,
    adapter: str = "",
    metadata: Sequence[tuple[str, str | bytes]] = (),
) -> list[GenerationRequest]:
    """Returns a request for each of the `n` choices: choice i draws with the seed + i. Raises InvalidField, TooLong.

    `longest`: the sequence length. `defaults`: the server's. `adapter`: the name of the one that they have.
    `metadata`: of the call.
    """
    given = message.sampling_params
    _check_served(message)
    limits.check_prompt(len(message.tokenized.input_ids), message.text, longest)
    check_stops(given.stop_token_ids, "stop", given.stop)
    count = given.n or 1
    if count > MAX_CHOICES:
        raise InvalidField("n", f"{count} is above the limit of {MAX_CHOICES}")
    first = GenerationRequest(
        text=message.text if message.WhichOneof("input") == "text" else None,
        token_ids=tuple(message.tokenized.input_ids) if message.WhichOneof("input") == "tokenized" else None,
        sampling=sampling_of(given, defaults),
        max_new_tokens=given.max_tokens if given.HasField("max_tokens") else None,
        stop_token_ids=tuple(given.stop_token_ids),
        stop_strings=tuple(given.stop),
        ignore_end_of_sequence=given.ignore_eos,
        logprobs=given.logprobs if given.HasField("logprobs") else None,
        adapter=adapter,
        **members(_extensions(metadata)),
    )
    return [replace(first, sampling=_moved(first.sampling, i)) for i in range(count)]


def _extensions(metadata: Sequence[tuple[str, str | bytes]]) -> dict[str, str | bytes]:
    """Returns the options that come in a call's metadata. Raises InvalidField for one of ours that is not served."""
    given = {key: value for key, value in metadata if key.startswith(_OURS)}
    for name in sorted(key.removeprefix(_OURS) for key in given.keys() - EXTENSIONS.keys()):
        raise InvalidField(name[:64], _NO_RECEIPT if name == "receipt" else "not served")
    return {EXTENSIONS[key]: value for key, value in given.items()}


def sampling_of(given: pb.SamplingParams, defaults: RequestDefaults) -> SamplingParams:
    """Converts the parameters of a draw. What is absent takes the server's `defaults`, where it was given one.

    Else OpenAI's: temperature 1, and a seed drawn here. vLLM's protocol has no presence for other numbers, which count
    as absent where they are 0 and 0 means nothing. The gateway sends 1 for a top_p and repetition_penalty it was not
    given.
    """
    seed = given.seed % _SEEDS if given.HasField("seed") else defaults.given("seed", random.getrandbits(32))
    return SamplingParams(
        temperature=given.temperature if given.HasField("temperature") else defaults.given("temperature", 1.0),
        top_k=0 if given.top_k == _ALL_TOKENS else given.top_k,
        top_p=given.top_p or defaults.given("top_p", 1.0),
        min_p=given.min_p,
        seed=seed,
        logit_bias=tuple(sorted(given.logit_bias.items())),
        presence_penalty=given.presence_penalty,
        frequency_penalty=given.frequency_penalty,
        repetition_penalty=given.repetition_penalty or defaults.given("repetition_penalty", 1.0),
        structure=structure_of(given),
    )


def structure_of(given: pb.SamplingParams) -> Structure | None:
    """Converts what the output must match. A grammar is Lark's, as vLLM's llguidance backend takes it."""
    constraint = given.WhichOneof("constraint")
    if constraint is None:
        return None
    if constraint == "json_object":
        return Structure(StructureKind.JSON_SCHEMA, ANY_OBJECT) if given.json_object else None
    if constraint == "choice":
        return Structure(StructureKind.CHOICE, json.dumps(list(given.choice.choices)))
    return Structure(StructureKind(constraint), getattr(given, constraint))


def _moved(sampling: SamplingParams, choice: int) -> SamplingParams:
    return replace(sampling, seed=(sampling.seed + choice) % _SEEDS)


def _check_served(message: pb.GenerateRequest) -> None:
    for name in _INPUTS_NOT_SERVED:
        if name in {used.name for used, _ in message.ListFields()}:
            raise InvalidField(name, "not served")
    given = message.sampling_params
    for name, used in _NOT_SERVED.items():
        if used(given):
            raise InvalidField(name, "not served")


def chunk_reply(chunk: Chunk, choice: int, prompt_tokens: int, completion_tokens: int) -> pb.GenerateResponse:
    """Builds the reply that streams a chunk; `completion_tokens` counts those up to its end."""
    return pb.GenerateResponse(
        chunk=pb.GenerateStreamChunk(
            token_ids=chunk.token_ids,
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            index=choice,
            output_logprobs=output_logprobs(chunk.token_ids, chunk.logprobs),
        )
    )


def output_logprobs(token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> pb.OutputLogProbs | None:
    """Builds the log-probabilities of the tokens (rounded to 32 bits); None if none were asked for."""
    if not logprobs:
        return None
    return pb.OutputLogProbs(
        token_logprobs=[each.logprob for each in logprobs],
        token_ids=token_ids,
        top_logprobs=[
            pb.TopLogProbs(values=[value for _, value in each.top], token_ids=[token for token, _ in each.top])
            for each in logprobs
        ],
    )


def end_reply(
    end: GenerationEnd, request: GenerationRequest, choice: int, output: Output, stream: bool
) -> pb.GenerateResponse:
    """Builds the last reply of a choice. A streamed one does not repeat the tokens that were sent."""
    complete = pb.GenerateComplete(
        output_ids=() if stream else output.token_ids,
        output_logprobs=None if stream else output_logprobs(output.token_ids, output.logprobs),
        finish_reason="length" if end.finish_reason is FinishReason.LENGTH else "stop",
        prompt_tokens=end.prompt_tokens,
        completion_tokens=end.output_tokens,
        cached_tokens=end.stats.cached_prompt_tokens,
        index=choice,
        spec_accepted_tokens=end.stats.accepted,
        spec_draft_tokens=end.stats.drafted,
    )
    if end.finish_reason is FinishReason.STOP_TOKEN:
        complete.matched_token_id = output.token_ids[-1]
    elif end.finish_reason is FinishReason.STOP_STRING and len(request.stop_strings) == 1:
        complete.matched_stop_str = request.stop_strings[0]
    return pb.GenerateResponse(complete=complete)


def aborted_reply(choice: int, prompt_tokens: int, output: Output, stream: bool) -> pb.GenerateResponse:
    """Builds the last reply of a choice whose request was aborted."""
    return pb.GenerateResponse(
        complete=pb.GenerateComplete(
            output_ids=() if stream else output.token_ids,
            output_logprobs=None if stream else output_logprobs(output.token_ids, output.logprobs),
            finish_reason="abort",
            prompt_tokens=prompt_tokens,
            completion_tokens=len(output.token_ids),
            index=choice,
        )
    )
