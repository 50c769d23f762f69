"""Every field of a request that can grow has a limit, and what is beyond is refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from tandem.rpc import wire
from tandem.rpc.channel import DRAFT, MESSAGES, TARGET
from tandem.v1 import generation_pb2, target_verifier_pb2
from tests.reliability.messages import is_repeated
from tests.services.test_identity import proposing
from tests.support import PROMPT, SAMPLED, Refusal, ids, opening, raw_stub, refusal, run, target_site, toy, worker_site
from tests.toy import ToyTokenizer

LENGTH, MOST = 160, 5  # of the toy servers here
GROWS = (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)
REFUSED = ("INVALID_ARGUMENT", "OUT_OF_RANGE")


def fields(message: Descriptor) -> Iterator[str]:
    """Message.field of all that can grow in a message, whatever it holds included."""
    for field in message.fields:
        if field.message_type:
            yield from fields(field.message_type)
        if is_repeated(field) or field.type in GROWS:
            yield f"{message.name}.{field.name}"


FIELDS = sorted(
    {
        name
        for service, module in MESSAGES.items()
        for method in module.DESCRIPTOR.services_by_name[service].methods
        for name in fields(method.input_type)
    }
)


def generating(prompt: list[int] = PROMPT, **changes: Any) -> Any:
    message = wire.generation_to_wire(ids(prompt, 1))
    for name, value in changes.items():
        getattr(message, name).extend(value)
    return target_verifier_pb2.TargetVerifierGenerateRequest(generation=message)


def text(length: int) -> Any:
    generation = generation_pb2.Generation(text="x" * length)
    return target_verifier_pb2.TargetVerifierGenerateRequest(generation=generation)


def predicted(length: int) -> Any:
    return changed(generating(), generation=generation_pb2.Generation(prediction="x" * length))


def chat(*messages: dict[str, Any]) -> Any:
    generation = generation_pb2.Generation(messages={"messages": [{"role": "user"} | each for each in messages]})
    return target_verifier_pb2.TargetVerifierGenerateRequest(generation=generation)


def calls(*each: dict[str, Any]) -> Any:
    return chat({"role": "assistant", "tool_calls": each})


def sampling(**values: Any) -> Any:
    message = generating()
    message.generation.sampling.MergeFrom(generation_pb2.Sampling(**values))
    return message


def bias(tokens: int, biases: int) -> Any:
    return sampling(logit_bias=generation_pb2.LogitBias(token_ids=range(tokens), biases=[1.0] * biases))


def regex(length: int) -> Any:
    kind = generation_pb2.STRUCTURE_KIND_REGEX
    return sampling(structure=generation_pb2.Structure(kind=kind, text="x" * length))


def changed(request: Any, **values: Any) -> Any:
    request.MergeFrom(type(request)(**values))
    return request


def verifying(**values: Any) -> Any:
    return target_verifier_pb2.VerifyRequest(
        **{"session_id": "s", "base_length": len(PROMPT), "last_token": PROMPT[-1], **values}
    )


def drawn(tokens: int, weights: int) -> Any:
    return verifying(
        draft_tokens=[1],
        distributions=[generation_pb2.SparseDistribution(token_ids=[1] * tokens, weights=[1.0] * weights)],
    )


def running(**values: Any) -> Any:
    return verifying(**{"draft_tokens": [1], "run_until": LENGTH, **values})


CLOSE = target_verifier_pb2.CloseSessionRequest
# Each field one beyond its limit: service, method, request, the limit as the refusal names it.
BEYOND: dict[str, list[tuple[str, str, Any, int]]] = {
    "Generation.text": [(TARGET, "Generate", text(64 * LENGTH + 1), 64 * LENGTH)],
    "Generation.prediction": [(TARGET, "Generate", predicted(64 * LENGTH + 1), 64 * LENGTH)],
    "ChatMessages.messages": [(TARGET, "Generate", chat(*[{"role": ""}] * 4097), 4096)],
    **{
        f"ChatMessage.{name}": [(TARGET, "Generate", chat({name: "x" * (64 * LENGTH + 1)}), 64 * LENGTH)]
        for name in ("role", "content", "name", "tool_call_id")
    },
    "ChatMessage.tool_calls": [(TARGET, "Generate", calls(*[{"name": "f"}] * 129), 128)],
    **{
        f"ToolCall.{name}": [(TARGET, "Generate", calls({name: "x" * (64 * LENGTH + 1)}), 64 * LENGTH)]
        for name in ("id", "name", "arguments")
    },
    "TokenIds.ids": [(TARGET, "Generate", generating([1] * (LENGTH + 1)), LENGTH)],
    "Generation.stop_token_ids": [(TARGET, "Generate", generating(stop_token_ids=[1] * 1025), 1024)],
    "Generation.stop_strings": [
        (TARGET, "Generate", generating(stop_strings=["x"] * 65), 64),
        (TARGET, "Generate", generating(stop_strings=["x" * 1025]), 1024),
    ],
    "Generation.adapter": [
        (TARGET, "Generate", changed(generating(), generation=generation_pb2.Generation(adapter="x" * 257)), 256)
    ],
    "LogitBias.token_ids": [(TARGET, "Generate", bias(1025, 1), 1024)],
    "LogitBias.biases": [(TARGET, "Generate", bias(1, 1025), 1024)],
    "Structure.text": [(TARGET, "Generate", regex(65537), 65536)],
    "OpenSessionRequest.session_id": [(TARGET, "OpenSession", opening("x" * 129), 128)],
    "OpenSessionRequest.prefix": [(TARGET, "OpenSession", opening(prefix=[1] * (LENGTH + 1)), LENGTH)],
    **{
        f"OpenSessionRequest.{name}": [(TARGET, "OpenSession", changed(opening(), **{name: "x" * 257}), 256)]
        for name in ("tokenizer_sha256", "weights_revision", "dtype", "adapter", "adapter_revision")
    },
    "FeatureRequest.layers": [(TARGET, "OpenSession", changed(opening(), features={"layers": [1] * 9}), 8)],
    "VerifyRequest.session_id": [(TARGET, "Verify", verifying(session_id="x" * (256 * 1024)), 256 * 1024)],
    "VerifyRequest.draft_tokens": [
        (TARGET, "Verify", verifying(draft_tokens=[1] * (MOST + 1)), MOST),
        (TARGET, "VerifyStream", running(draft_tokens=[1] * 257), 256),
    ],
    "VerifyRequest.distributions": [
        (TARGET, "Verify", changed(drawn(1, 1), distributions=[generation_pb2.SparseDistribution()]), 1)
    ],
    "VerifyRequest.stop_token_ids": [(TARGET, "VerifyStream", running(stop_token_ids=[1] * 257), 256)],
    "SparseDistribution.token_ids": [(TARGET, "Verify", drawn(1025, 1), 1024)],
    "SparseDistribution.weights": [(TARGET, "Verify", drawn(1, 1025), 1024)],
    "CloseSessionRequest.session_id": [(TARGET, "CloseSession", CLOSE(session_id="x" * 4096), 4096)],
    "ProposeRequest.tokens": [(DRAFT, "Propose", proposing([1] * (LENGTH + 1)), LENGTH)],
    "ProposeRequest.tokenizer_sha256": [(DRAFT, "Propose", proposing(PROMPT, tokenizer_sha256="x" * 257), 256)],
}


def test_every_field_that_can_grow_has_a_limit() -> None:
    assert sorted(BEYOND) == FIELDS


@pytest.mark.parametrize("field", BEYOND)
def test_beyond_its_limit_a_field_is_refused_and_the_limit_is_named(field: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(ToyTokenizer, "encode", None)  # nobody gets as far
    monkeypatch.setattr(ToyTokenizer, "render", None)

    async def test() -> list[Refusal]:
        async with (
            target_site(toy()) as target,
            worker_site(None) as worker,
            raw_stub(target.address, TARGET) as verifier,
            raw_stub(worker.address, DRAFT) as drafter,
        ):
            runs = any(method == "VerifyStream" for _, method, _, _ in BEYOND[field])
            rule = generation_pb2.VERIFICATION_RULE_AGREEMENT if runs else generation_pb2.VERIFICATION_RULE_REJECTION
            await verifier.OpenSession(changed(opening(), sampling=wire.sampling_to_wire(SAMPLED), rule=rule))
            said = []
            for service, method, request, _ in BEYOND[field]:
                called = getattr(verifier if service == TARGET else drafter, method)
                streams = method in ("VerifyStream", "Propose")
                call = called(iter([request]) if streams else request)
                said.append(await refusal(call))
            return said

    for said, (_, _, _, most) in zip(run(test()), BEYOND[field], strict=True):
        named = field.partition(".")[2] in said.message or said.code == "OUT_OF_RANGE" or most >= 4096
        assert said.code in REFUSED and str(most) in said.message and named
