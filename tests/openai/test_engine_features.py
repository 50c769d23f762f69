"""Biases, penalties, structures and log-probabilities by the gateway's worker protocol, against plain decoding."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from tandem.speculation.types import SamplingParams, Structure, StructureKind
from tests.openai.site import asking, engine_site, one
from tests.services.test_sampling_features import BIAS, CHOICE, GRAMMAR, JSON, PROMPT, REGEX, reference
from tests.support import run

FEATURES: dict[str, tuple[dict[str, Any], SamplingParams]] = {
    "biases and penalties": (
        {"logit_bias": dict(BIAS), "presence_penalty": 1.5, "frequency_penalty": 0.75, "repetition_penalty": 1.25},
        SamplingParams(logit_bias=BIAS, presence_penalty=1.5, frequency_penalty=0.75, repetition_penalty=1.25),
    ),
    "json_schema": ({"json_schema": JSON.text}, SamplingParams(structure=JSON)),
    "json_object": (
        {"json_object": True},
        SamplingParams(structure=Structure(StructureKind.JSON_SCHEMA, '{"type": "object"}')),
    ),
    "regex": ({"regex": REGEX.text}, SamplingParams(structure=REGEX)),
    "choice": ({"choice": pb.ChoiceConstraint(choices=json.loads(CHOICE.text))}, SamplingParams(structure=CHOICE)),
    "grammar": ({"grammar": GRAMMAR.text}, SamplingParams(structure=GRAMMAR)),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("feature", FEATURES)
def test_a_feature_gives_the_tokens_and_log_probabilities_of_plain_decoding(feature: str, stream: bool) -> None:
    async def test() -> None:
        fields, sampling = FEATURES[feature]
        async with engine_site(drafts=True) as site:
            for drawing in ({"temperature": 0.0}, {"temperature": 0.75, "seed": 7}):
                tokens, logprobs = reference(replace(sampling, **drawing), 24)
                answer = await one(site, asking(24, PROMPT, stream=stream, logprobs=3, **fields, **drawing))
                assert answer.tokens == tokens
                rounded = [(each.logprob, dict(each.top)) for each in logprobs]
                assert [token for token, _, _ in answer.logprobs] == list(tokens)
                for (_, value, top), (expected, likeliest) in zip(answer.logprobs, rounded, strict=True):
                    assert value == np.float32(expected)
                    assert top == {token: np.float32(logprob) for token, logprob in likeliest.items()}

    run(test())


def test_log_probabilities_come_only_if_asked_for_and_alone_with_0() -> None:
    async def test() -> None:
        async with engine_site() as site:
            assert (await one(site, asking(4))).logprobs == ()
            alone = (await one(site, asking(4, logprobs=0))).logprobs
            assert len(alone) == 4 and all(top == {} for _, _, top in alone)

    run(test())
