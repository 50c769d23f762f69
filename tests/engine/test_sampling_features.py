"""Sampling features on a small Llama: fused with a draft, natively and in module code, they are plain decoding's."""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import replace
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tandem.engine.batcher import Batcher
from tandem.engine.generators import fused_generator, plain_generator
from tandem.engine.load_models import load_pair
from tandem.engine.model_config import DraftChoice, ModelConfig
from tandem.engine.structures import Structures
from tandem.runners.load_runner import Execution, Shape
from tandem.runners.native.native_runner import NativeRunner
from tandem.speculation.types import FinishReason, SamplingParams, Structure, StructureKind
from tests.daily import daily
from tests.runners.tiny import model_folder
from tests.support import Answer, answer, ids, run

pytest.importorskip("llguidance")

PROMPT = tuple(b"abcabc")
SCHEMA = {
    "type": "object",
    "properties": {"n": {"enum": [1, 22, 333]}, "s": {"enum": ["é", "b"]}},
    "required": ["n", "s"],
}
JSON = Structure(StructureKind.JSON_SCHEMA, json.dumps(SCHEMA | {"additionalProperties": False}))
FEATURES = {
    "nothing": SamplingParams(),
    "penalties and bias": SamplingParams(
        logit_bias=((70, 4.0), (80, -9.0)), presence_penalty=1.0, frequency_penalty=0.5, repetition_penalty=1.4
    ),
    "json": SamplingParams(structure=JSON),
    "json and penalties": SamplingParams(structure=JSON, repetition_penalty=1.2, frequency_penalty=0.3),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    base = tmp_path_factory.mktemp("tiny")
    return model_folder(base / "target", 1), model_folder(base / "draft", 2)


@pytest.mark.each_value
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("compile", daily(["native", "off"], 0))
async def test_a_real_pair_gives_the_tokens_and_log_probabilities_of_plain_decoding(
    folders: tuple[Path, Path], compile: str, feature: str
) -> None:
    target_folder, draft_folder = map(str, folders)
    config = ModelConfig(
        Execution("cpu", "float32", 1, compile), Shape(3, 64, 4), target_folder, DraftChoice("model", draft_folder)
    )
    greedy, plain_row = FEATURES[feature], ids(PROMPT, 12)
    batcher = Batcher("test")
    target, draft = await load_pair(config, batcher)
    assert isinstance(target.runner, NativeRunner) == (compile == "native")
    plain, fused = plain_generator(target), fused_generator(target, draft, 4, config.draft)
    for sampling in (greedy, replace(greedy, temperature=0.8, top_p=0.9, seed=5)):
        request = ids(PROMPT, 24, sampling=sampling, logprobs=4)
        truth = await answer(plain.generate, request)
        assert len(truth.logprobs) == len(truth.token_ids)
        check_structure(truth, sampling)
        alone = await answer(fused.generate, request)
        beside, _ = await asyncio.gather(answer(fused.generate, request), answer(fused.generate, plain_row))
        for got in (alone, beside):
            assert (got.token_ids, got.logprobs) == (truth.token_ids, truth.logprobs)
            assert got.completion.stats.drafted
    await batcher.close()


class Spelling:
    """Bytes and a few longer tokens, of which the tokenizer takes the longest."""

    end_of_sequence_ids = (0,)

    def spelling(self) -> str:
        symbols = ("<end>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "es", "yes", '"n', '":')
        merges = [("e", "s"), ("y", "es"), ('"', "n"), ('"', ":")]
        tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(symbols)}, merges=merges))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens(["<end>"])
        return str(tokenizer.to_str())


@pytest.mark.parametrize(
    "structure",
    [JSON, Structure(StructureKind.CHOICE, '["yes", "zes"]'), Structure(StructureKind.REGEX, "(es|n)+x?")],
    ids=["json", "choice", "regex"],
)
def test_asked_about_one_token_a_structure_says_what_its_mask_says(structure: Structure) -> None:
    """Also where the grammar forces what comes next: the mask then has one of several spellings."""
    matcher = run(Structures(Spelling(), 261).matcher(structure))
    forced, chance = 0, random.Random(1)
    for _ in range(40):
        allowed = [token for token in range(261) if matcher.allows(token)]
        mask = matcher.mask()
        assert allowed == np.flatnonzero(mask).tolist() == [token for token in range(261) if matcher.allows(token)]
        for token in range(261):
            if matcher.advance(token):
                forced += not mask[token]
                matcher.back(1)
        first = structure.kind is StructureKind.CHOICE  # single bytes have the lowest ids: "y", and then "es" is forced
        assert matcher.advance(allowed[0] if first else chance.choice(allowed))
    assert forced or structure.kind is not StructureKind.CHOICE
    assert not matcher.allows(261)


def check_structure(got: Answer, sampling: SamplingParams) -> None:
    if sampling.structure and got.completion.finish_reason is FinishReason.END_OF_SEQUENCE:
        jsonschema.validate(json.loads(got.text), SCHEMA)
