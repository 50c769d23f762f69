"""Logit bias, penalties, structured output and log-probabilities: in every architecture, those of plain decoding."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle
from typing import Any

import jsonschema
import numpy as np
import pytest

from tandem.engine.structure_worker import grammar, vocabulary_of
from tandem.rpc.received_errors import TandemError
from tandem.rpc.wire_sessions import answer_from_wire
from tandem.services.target_verifier import TargetVerifierService
from tandem.speculation.draws import draw
from tandem.speculation.elementary import exp, log
from tandem.speculation.elementary import total as sum_of
from tandem.speculation.types import (
    FinishReason,
    Request,
    Rule,
    SamplingParams,
    Structure,
    StructureKind,
    TokenLogprobs,
)
from tandem.speculation.verification_mode import Pipeline
from tandem.v1 import target_verifier_pb2 as pb
from tests import support
from tests.architectures import ARCHITECTURES, serving
from tests.daily import daily
from tests.support import GREEDY, Answer, answer, distributed, fused_site, ids, oracle, raw_stub, target_site, toy
from tests.toy import END, VOCAB_SIZE, ToyRunner, ToyTokenizer, toy_logits

llguidance = pytest.importorskip("llguidance")

DRAFTS = {"perfect": "salt=0", "noisy": "miss=0.3", "always wrong": "salt=9", "n-gram": None}

PROMPT = b"abcabcabc"
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "n": {"type": "integer", "minimum": 0, "maximum": 999}},
    "required": ["ok", "n"],
    "additionalProperties": False,
}
JSON = Structure(StructureKind.JSON_SCHEMA, json.dumps(SCHEMA))
REGEX = Structure(StructureKind.REGEX, r"([a-f]+[0-9]{2,3} ?){3,9}")
CHOICE = Structure(StructureKind.CHOICE, '["yes", "no", "\\"per\\nhaps\\"", "yesterday"]')
GRAMMAR = Structure(StructureKind.GRAMMAR, 'start: item+ "."\nitem: "<" /[a-z]+/ ">"')
BIAS = (*((token, 3.5) for token in range(97, 110)), (END, -100.0))
FEATURES = {
    "bias": SamplingParams(logit_bias=BIAS),
    "penalties": SamplingParams(presence_penalty=1.5, frequency_penalty=0.75, logit_bias=BIAS),
    "repetition": SamplingParams(repetition_penalty=1.6, logit_bias=BIAS),
    "json": SamplingParams(structure=JSON),
    "regex": SamplingParams(structure=REGEX),
    "choice": SamplingParams(structure=CHOICE),
    "grammar": SamplingParams(structure=GRAMMAR),
    "all": SamplingParams(
        structure=REGEX, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.5, logit_bias=BIAS
    ),
}


def sampled(params: SamplingParams, seed: int = 7) -> SamplingParams:
    return replace(params, temperature=0.9, top_k=40, top_p=0.95, min_p=0.01, seed=seed)


def allowed(structure: Structure, output: Sequence[int]) -> set[int]:
    """What may follow `output`, from a matcher that has followed it from the start."""
    if structure.kind is StructureKind.CHOICE:
        choices = [choice.encode() for choice in json.loads(structure.text)]
        rest = [choice[len(output) :] for choice in choices if choice[: len(output)] == bytes(output)]
        return {part[0] if part else END for part in rest}
    matcher = llguidance.LLMatcher(vocabulary(), grammar(structure.kind.value, structure.text), log_level=0)
    assert matcher.consume_tokens(list(output)) or not output
    bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
    return set(np.flatnonzero(bits[:VOCAB_SIZE]).tolist())


@functools.cache
def vocabulary() -> Any:
    return vocabulary_of(ToyTokenizer().spelling(), VOCAB_SIZE, END)


@functools.cache
def reference(
    sampling: SamplingParams, count: int, memory: int = 0
) -> tuple[tuple[int, ...], tuple[TokenLogprobs, ...]]:
    """The tokens of plain decoding and their log-probabilities, worked out from nothing but the definitions.

    `memory`: how many tokens the target sees (0: all).
    """
    output: list[int] = []
    logprobs = []
    while len(output) < count and END not in output:
        raw = toy_logits([*PROMPT, *output][-memory:], ToyRunner(toy().limits).config)
        logits = raw.copy()
        penalty = np.float32(sampling.repetition_penalty)
        for token in {*PROMPT, *output} if penalty != 1 else ():
            logits[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
        for token in set(output):
            logits[token] -= np.float32(sampling.frequency_penalty) * np.float32(output.count(token))
            logits[token] -= np.float32(sampling.presence_penalty)
        for token, bias in sampling.logit_bias:
            logits[token] += np.float32(bias)
        if sampling.structure:
            out = sorted(set(range(VOCAB_SIZE)) - allowed(sampling.structure, output))
            logits[out] = -np.inf
        token = draw(logits, sampling, len(PROMPT) + len(output))
        wide = raw.astype(np.float64)
        total = float(raw.max()) + float(log(sum_of(exp(wide - float(raw.max())))))
        likeliest = sorted(range(VOCAB_SIZE), key=lambda v: (-raw[v], v))[:3]
        logprobs.append(TokenLogprobs(float(raw[token]) - total, tuple((v, float(raw[v]) - total) for v in likeliest)))
        output.append(token)
    return tuple(output), tuple(logprobs)


SIXTHS = cycle([*FEATURES][part::6] for part in range(6))
NOISY = [*((each, "noisy") for each in ARCHITECTURES), ("fused", "n-gram")]
SOME = [(*pair, ((0, 3), (5,)), next(SIXTHS)) for pair in NOISY]
ALL = [(*pair, ((0, 3, 5),) * 2, [*FEATURES]) for pair in (*NOISY, *((each, "perfect") for each in ARCHITECTURES))]


@pytest.mark.parametrize(
    ("architecture", "draft", "lengths", "features"),
    daily([*SOME, *ALL], *range(len(SOME))),
    ids=[f"{architecture}-{draft}-{'-'.join(names)}" for architecture, draft, _, names in (*SOME, *ALL)],
)
async def test_every_architecture_gives_the_tokens_and_log_probabilities_of_plain_decoding(
    architecture: str, draft: str, lengths: tuple[tuple[int, ...], ...], features: Sequence[str]
) -> None:
    greedy, drawn = lengths
    samplings = [
        (name, *one) for name in features for one in ((FEATURES[name], greedy), (sampled(FEATURES[name]), drawn))
    ]
    for name in features:
        assert reference(FEATURES[name], 24)[0] != oracle(PROMPT, GREEDY, 24), f"{name} has no effect"
    async with serving(architecture, DRAFTS[draft]) as served:
        for name, sampling, ks in samplings:
            expected = reference(sampling, 24)
            for k in ks:
                request = ids(PROMPT, 24, sampling=sampling, speculation_length=k, logprobs=3)
                got = await answer(served.generate, request)
                assert (got.token_ids, got.logprobs) == expected, f"{name}, k={k}"
                if draft == "perfect" and k and architecture != "autoregressive":
                    stats = got.completion.stats
                    assert stats.accepted == stats.drafted or END in got.token_ids, "the draft is changed alike"


def matches(got: Answer, structure: Structure) -> None:
    assert got.completion.finish_reason is FinishReason.END_OF_SEQUENCE
    if structure is JSON:
        jsonschema.validate(json.loads(got.text), SCHEMA)
    if structure is CHOICE:
        assert got.text in json.loads(CHOICE.text)


@pytest.mark.each_value
@pytest.mark.parametrize("rule", Rule)
@pytest.mark.parametrize("structure", [JSON, CHOICE])
async def test_output_matches_its_structure_and_ends_where_it_does(structure: Structure, rule: Rule) -> None:
    async with fused_site(toy(), toy()) as site, site.client() as client:
        for seed in range(12):
            # The toy's choices are random, so that whitespace would go on: it is made unlikely.
            rare = ((9, -50.0), (10, -20.0), (32, -50.0))
            sampling = SamplingParams(1.0, seed=seed, structure=structure, logit_bias=rare)
            got = await answer(client.generate, ids(PROMPT, 140, sampling=sampling, rule=rule, logprobs=0))
            matches(got, structure)
            assert len(got.logprobs) == len(got.token_ids)


# --- sessions ---


def opening(sampling: SamplingParams, prefix: Sequence[int] = PROMPT, session: str = "s", **rest: Any) -> Any:
    return support.opening(session, prefix, sampling, prompt_length=len(PROMPT), **rest)


async def test_a_session_replays_log_probabilities_and_goes_on_from_any_prefix() -> None:
    sampling = sampled(FEATURES["all"])
    tokens, logprobs = reference(sampling, 24)

    def round_at(done: int, drafted: Sequence[int], session: str = "s") -> pb.VerifyRequest:
        last = [*PROMPT, *tokens][len(PROMPT) + done - 1]
        return pb.VerifyRequest(
            session_id=session, base_length=len(PROMPT) + done, last_token=last, draft_tokens=drafted
        )

    async def verified(stub: Any, done: int, drafted: Sequence[int], session: str = "s", replayed: bool = False) -> int:
        request = round_at(done, drafted, session)
        reply = await stub.Verify(request)
        assert reply.replayed == replayed
        verdict = answer_from_wire(reply, request, Request(logprobs=3), None, 1.0)
        assert verdict is not None
        end = done + len(verdict.token_ids)
        assert verdict.token_ids == tokens[done:end] and verdict.logprobs == logprobs[done:end]
        return end

    async with target_site() as site, raw_stub(site.address) as stub:
        opened = await stub.OpenSession(opening(sampling, logprobs=3))
        assert tuple(opened.processed_fields) == sampling.processed
        done = await verified(stub, 0, tokens[:3])
        assert await verified(stub, 0, tokens[:3], replayed=True) == done == 4
        done = await verified(stub, done, [*tokens[done : done + 2], 0])
        # The client lost the last round's reply; then it goes back further.
        reopened = await stub.OpenSession(opening(sampling, [*PROMPT, *tokens[:4]], logprobs=3))
        assert reopened.committed_length == len(PROMPT) + done
        assert await verified(stub, 4, [*tokens[4:6], 0], replayed=True) == done
        await stub.OpenSession(opening(sampling, [*PROMPT, *tokens[:2]], logprobs=3))
        assert await verified(stub, 2, [0, 0]) == 3
    async with target_site() as other, raw_stub(other.address) as stub:
        await stub.OpenSession(opening(sampling, [*PROMPT, *tokens[:done]], "elsewhere", logprobs=3))
        await verified(stub, done, tokens[done : done + 5], "elsewhere")


# --- what is refused ---

REFUSED = [
    ("logit_bias", {"logit_bias": ((258, 1.0),)}, "outside the vocabulary"),
    ("structure", {"structure": Structure(StructureKind.REGEX, "(")}, "unclosed group"),
    ("structure", {"structure": Structure(StructureKind.REGEX, "(?=a)b")}, "look-ahead"),
    ("structure", {"structure": Structure(StructureKind.JSON_SCHEMA, '{"type": "never"}')}, "never"),
    (
        "structure",
        {"structure": Structure(StructureKind.JSON_SCHEMA, '{"patternProperties": {"a": {}, "b": {}}}')},
        "disjoint",
    ),
    ("structure", {"structure": Structure(StructureKind.JSON_SCHEMA, '{"$ref": "http://x/y"}')}, "x/y"),
    ("structure", {"structure": Structure(StructureKind.GRAMMAR, "start: nothing")}, "nothing"),
]


async def refusal(asked: Any) -> TandemError:
    with pytest.raises(TandemError) as caught:
        await asked
    return caught.value


@pytest.mark.parametrize("architecture", ["autoregressive", "fused", "draft_worker"])
async def test_what_cannot_be_done_is_refused_by_the_name_of_its_field(architecture: str) -> None:
    async with serving(architecture, "miss=0.3") as served:
        for field, values, why in REFUSED:
            error = await refusal(answer(served.generate, ids(PROMPT, 4, sampling=SamplingParams(**values))))
            assert error.code == "INVALID_ARGUMENT" and error.message.startswith(f"{field}: ") and why in str(error)


async def test_a_session_refuses_what_it_cannot_continue_exactly() -> None:
    sampling = FEATURES["choice"]
    async with target_site() as site, raw_stub(site.address) as stub:
        refused = support.refusal
        wrong = await refused(stub.OpenSession(opening(sampling, b"abcabcabcmaybe")))
        assert (wrong.code, wrong.message) == (
            "INVALID_ARGUMENT",
            "prefix: the output in it does not match the structure",
        )
        await stub.OpenSession(opening(sampling))
        other = opening(sampling)
        other.prompt_length = 4
        assert "does not match the structure" in (await refused(stub.OpenSession(other))).message
        penalized = opening(FEATURES["penalties"], session="p")
        await stub.OpenSession(penalized)
        penalized.prompt_length = 4
        assert "is open with a prompt of 9 tokens" in (await refused(stub.OpenSession(penalized))).message
        beyond = opening(sampling, session="l", logprobs=21)
        far = await refused(stub.OpenSession(beyond))
        assert far.code == "INVALID_ARGUMENT" and far.message.startswith("logprobs: 21")
        assert site.free == 2, "what was refused holds nothing"


async def test_without_llguidance_only_structures_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "llguidance", None)
    async with serving("fused", "miss=0.3") as served:
        error = await refusal(answer(served.generate, ids(PROMPT, 4, sampling=FEATURES["json"])))
        assert error.code == "INVALID_ARGUMENT" and "tandem-speculative[structured]" in error.message
        got = await answer(served.generate, ids(PROMPT, 24, sampling=FEATURES["penalties"]))
        assert got.token_ids == reference(FEATURES["penalties"], 24)[0]


class OlderVerifier(TargetVerifierService):
    """Leaves out what it does not know, as protobuf does."""

    async def OpenSession(self, request: Any, context: Any) -> Any:
        for name in ("structure", "logit_bias", "presence_penalty"):
            request.sampling.ClearField(name)
        request.ClearField("logprobs")
        return await super().OpenSession(request, context)


@pytest.mark.parametrize(
    "pipeline", [Pipeline.OFF, Pipeline.ON, Pipeline.NEVER_WAITING], ids=["unary", "stream", "run"]
)
async def test_a_target_that_does_not_know_a_field_is_noticed(
    monkeypatch: pytest.MonkeyPatch, pipeline: Pipeline
) -> None:
    """An older one ignores it: the tokens would be wrong, and nobody would be told."""
    monkeypatch.setattr("tests.support.TargetVerifierService", OlderVerifier)
    async with target_site() as site, distributed(site.address, pipeline=pipeline) as (generator, _):
        for field, request in (
            ("structure", ids(PROMPT, 4, sampling=FEATURES["json"])),
            ("logit_bias", ids(PROMPT, 4, sampling=FEATURES["bias"])),
            ("logprobs", ids(PROMPT, 4, logprobs=2)),
        ):
            error = await refusal(answer(generator.generate, request))
            if field == "logprobs":
                assert error.code == "UNAVAILABLE" and "broke the contract: logprobs: 0 for " in error.message
            else:
                assert error.code == "FAILED_PRECONDITION" and error.message.startswith(f"{field}: ")
