"""The C++ step: the logits of transformers, the same bits in every shape of step, nothing left over from before."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from tandem.checkpoints.locate import find
from tandem.runners.families import UnsupportedModel
from tandem.runners.fused_step import fused, fused_step
from tandem.runners.load_runner import Execution, Shape, load_runner
from tandem.runners.native import LibraryMissing, NativeUnavailable, compilation
from tandem.runners.native.native_runner import NativeRunner
from tandem.runners.native.weights import UNQUANTISED
from tandem.runners.protocol import FusedResult, FusedRow, Limits, Proposal, RowFailed, RunnerIdentity
from tandem.speculation.processing import Mask, Processing
from tandem.speculation.types import Rule, SamplingParams, Verdict
from tests.rows import fill, fused_row, propose_row, verify_row
from tests.runners.modules import native_of
from tests.runners.tiny import model_folder

VOCAB, SLOTS, CHUNK = 211, 3, 64
LIMITS = Limits(SLOTS, 120, 5, CHUNK, VOCAB)
GREEDY = SamplingParams()
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 90,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILY: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama with biases, no shared heads, a tied head": (
        "llama",
        {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 6, "tie_word_embeddings": True},
    ),
    "llama3 rotary embedding, wide heads": ("llama", {"rope_parameters": LLAMA3, "head_dim": 96}),
    "heads 48 wide, as stories15M has": ("llama", {"head_dim": 48}),
    "mistral": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
}
DTYPES = (torch.float32, torch.bfloat16)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])


def module_of(name: str = "llama", dtype: torch.dtype = torch.float32, **changes: object) -> Any:
    kind, own = FAMILY[name]
    return made_module(kind, dtype, {**SIZES, **own, **changes})


def made_module(kind: str, dtype: torch.dtype, fields: dict[str, Any]) -> Any:
    torch.manual_seed(3)
    config = transformers.AutoConfig.for_model(kind, **fields)
    module = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager")
    for parameter in module.parameters():  # biases and norms start as 0 and 1, which would hide that they are lost
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, mean=1.0, std=0.3)
    return module.eval()


def native(module, only=None, verifies=True, threads=2, packing=UNQUANTISED) -> NativeRunner:  # type: ignore[no-untyped-def]
    return native_of(module, threads, LIMITS, RunnerIdentity("m", "r", "d", "cpu", "native"), verifies, only, packing)


def sequence(count: int, seed: int = 0) -> list[int]:
    return [random.Random(seed * 1000 + i).randrange(VOCAB) for i in range(count)]


def check_bits(*runners: NativeRunner) -> None:
    """Feeds a sequence to each in random pieces and company, and compares with the first one's whole chunks."""
    runner, tokens, chance = runners[0], sequence(90), random.Random(5)
    whole = runner.model.feed([0], [0], [tokens[:CHUNK]]), runner.model.feed([0], [CHUNK], [tokens[CHUNK:]])
    behind = np.concatenate(whole)  # type: ignore[arg-type]
    for other in runners:
        done = {slot: 0 for slot in range(SLOTS)}
        while any(done[slot] < len(tokens) for slot in done):
            slots = [s for s in chance.sample(range(SLOTS), chance.randint(1, SLOTS)) if done[s] < len(tokens)]
            rows = [tokens[done[s] : done[s] + chance.randint(1, 9)] for s in slots]
            if not rows:
                continue
            logits = other.model.feed(slots, [done[s] for s in slots], rows)
            expected = np.concatenate(
                [behind[done[s] : done[s] + len(row)] for s, row in zip(slots, rows, strict=True)]
            )
            assert np.array_equal(logits, expected)  # type: ignore[arg-type]
            for s, row in zip(slots, rows, strict=True):
                done[s] = max(0, done[s] + len(row) - chance.randint(0, 3) * (done[s] + len(row) < 80))  # roll back


@every_dtype
def test_what_stands_behind_a_position_does_not_reach_it_not_even_as_nan(dtype: str) -> None:
    runner = native(module_of(dtype=dtype))
    tokens = [8 if t == 7 else t for t in sequence(40)]
    clean = runner.model.feed([2], [0], [tokens])
    poisoned = module_of(dtype=dtype)
    poisoned.get_input_embeddings().weight.data[7] = torch.nan
    runner = native(poisoned)
    runner.model.feed([2], [0], [[7] * 80])  # the slot is full of NaN
    for at in range(0, 40, 5):
        again = runner.model.feed([2], [at], [tokens[at : at + 5]])
        assert np.array_equal(again, clean[at : at + 5])  # type: ignore[index, arg-type]


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(temperature=1.0)], ids=["greedy", "sampled"])
def test_a_poisoned_row_fails_alone_and_its_draft_ends(sampling: SamplingParams) -> None:
    module = module_of()
    module.get_input_embeddings().weight.data[7] = torch.nan
    runner = native(module)
    tokens = [t for t in sequence(20) if t != 7]
    for slot in (0, 1):
        fill(runner, slot, tokens[:-1])
    at = len(tokens) - 1
    failed, sound = runner.verify([verify_row(0, at, 7, (5,), sampling), verify_row(1, at, tokens[-1], (7,), sampling)])
    assert isinstance(failed, RowFailed) and "no finite largest logit" in str(failed)
    assert sound.accepted == 0 and len(sound.token_ids) == 1  # type: ignore[union-attr]
    (alone,) = runner.verify([verify_row(1, at, tokens[-1], (), sampling)])
    assert sound.token_ids == alone.token_ids  # type: ignore[union-attr]
    (proposal,) = runner.propose([propose_row(0, at, (7,), 3, sampling)])
    assert proposal.token_ids == ()  # type: ignore[union-attr]


def test_drafts_wider_than_a_step_together_are_verified_in_several() -> None:
    runner = native(module_of())
    rows = [verify_row(slot, 0, 5 + slot, tuple(sequence(110, slot)), GREEDY) for slot in range(SLOTS)]
    assert sum(len(row.fed) for row in rows) > runner.model.most_tokens
    assert runner.verify(rows) == [runner.verify([row])[0] for row in rows]


class Even:
    """A structure of even tokens only."""

    def mask(self) -> Mask:
        return np.arange(VOCAB) % 2 == 0

    def allows(self, token: int) -> bool:
        return token % 2 == 0

    advance = allows

    def back(self, count: int) -> None:
        """Nothing is remembered."""


PENALIZED = SamplingParams(repetition_penalty=1.3, presence_penalty=0.5)
SAMPLED = SamplingParams(temperature=0.9, top_p=0.9, seed=4)


@pytest.mark.each_value
@pytest.mark.parametrize("only", [None, tuple(range(0, VOCAB, 3))], ids=["whole head", "narrow head"])
@pytest.mark.parametrize("rule", Rule)
def test_a_fused_round_of_rows_of_every_kind_is_the_same_as_its_parts_alone(
    rule: Rule, only: tuple[int, ...] | None
) -> None:
    """And every committed token is what the target draws after those before it, one at a time, in any company."""
    target, draft = native(module_of()), native(module_of("llama"), only, verifies=False)
    chance, accepted, ended = random.Random(7), 0, 0
    for trial in range(15):
        rows: list[FusedRow] = []
        for slot in range(SLOTS):
            tokens = sequence(chance.randint(3, 40), seed=trial * 5 + slot)
            fill(target, slot, tokens[:-1])
            fill(draft, slot, tokens[:-2])
            sampling, matcher = chance.choice((GREEDY, PENALIZED, SAMPLED)), chance.choice((None, Even()))
            changed = Processing(sampling, len(tokens), matcher) if matcher or sampling is PENALIZED else None
            processor = changed.after(tokens) if changed else None
            asked = propose_row(slot, len(tokens) - 1, tuple(tokens[-2:]), 4, sampling, rule, VOCAB, processor)
            asked = replace(asked, least=chance.choice((0.0, 0.6)))
            rows.append(fused_row(asked, chance.random() < 0.3, logprobs=chance.choice([None, 3])))
        for row, got in zip(rows, fused(target, draft)(rows), strict=True):
            assert isinstance(got, FusedResult) and got.proposal.doubted == (len(got.proposal.token_ids) < 4)
            (alone,) = fused_step(target, draft, [row])
            assert isinstance(alone, FusedResult)
            assert replace(got.proposal, seconds=0.0) == replace(alone.proposal, seconds=0.0)
            step = {"rows": 1, "width": 5, "step_tokens": 5}  # which differ
            assert replace(got.verdict, **step) == replace(alone.verdict, **step)
            accepted, ended = accepted + got.verdict.accepted, ended + got.proposal.doubted
            if rule is Rule.AGREEMENT or row.propose.request.sampling.greedy:
                check_one_by_one(target, row, got.verdict)
    assert accepted > 20 and ended


def check_one_by_one(target: NativeRunner, row: FusedRow, verdict: Verdict) -> None:
    p, said, asked = row.propose, verdict.token_ids, row.propose.request
    before = p.processor.tokens if p.processor else ()
    for i, token in enumerate(said):
        after = p.processor.processing.after([*before, *said[:i]]) if p.processor else None
        wanted = {"margins": asked.margins, "logprobs": asked.logprobs}
        step = verify_row(p.slot, p.position + i, (p.tail[-1], *said)[i], (), asked.sampling, processor=after, **wanted)
        (alone,) = target.verify([step])
        assert isinstance(alone, Verdict) and alone.token_ids == (token,)
        assert alone.margins == verdict.margins[i : i + 1] and alone.logprobs == verdict.logprobs[i : i + 1]


def test_a_draft_ends_behind_the_token_where_its_own_probability_falls_below_the_least() -> None:
    draft, tokens = native(module_of()), sequence(30)
    for sampling in (GREEDY, SAMPLED):
        fill(draft, 0, tokens[:-2])
        asked = propose_row(0, 29, tuple(tokens[-2:]), 5, sampling)
        (whole,) = draft.propose([asked])
        assert isinstance(whole, Proposal) and len(whole.token_ids) == 5 and not whole.doubted
        logits = draft.verify_logits([verify_row(0, 29, tokens[-1], whole.token_ids, GREEDY)])[0]
        probable = np.cumprod(1 / np.exp(logits - logits.max(-1, keepdims=True)).sum(-1))
        for n in range(1, 5):
            (got,) = draft.propose([replace(asked, least=1.001 * probable[n - 1])])
            assert isinstance(got, Proposal) and got.token_ids == whole.token_ids[:n] and got.doubted


def test_what_a_draw_of_the_draft_raises_reaches_the_caller() -> None:
    class Broken(Even):
        def allows(self, token: int) -> bool:
            raise RuntimeError("broken matcher")

    draft = native(module_of(), verifies=False)
    processor = Processing(GREEDY, 1, Broken()).after([1, 2, 4])
    row = propose_row(0, 2, (2, 4), 3, GREEDY, processor=processor)
    with pytest.raises(RuntimeError, match="broken matcher"):
        draft.propose([row])
    sound = propose_row(1, 2, (2, 3), 3, GREEDY)
    assert len(draft.propose([sound])[0].token_ids) == 3  # type: ignore[union-attr]


def test_the_best_token_is_the_lowest_of_equals() -> None:
    module = module_of()
    module.get_output_embeddings().weight.data[:] = module.get_output_embeddings().weight.data[0]
    runner = native(module)
    (verdict,) = runner.verify([verify_row(0, 0, 5, (0, 0, 0), GREEDY)])
    assert verdict.token_ids == (0, 0, 0, 0)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"head_dim": 24}, "head_dim 24"),
        ({"rope_parameters": {"rope_type": "proportional", "rope_theta": 1e4}}, "type proportional"),
        ({"dtype": torch.float16}, "float16"),
        ({"max_position_embeddings": 100}, "sequence_length: 120 is above the model's 100"),
    ],
)
def test_what_the_step_does_not_compute_is_refused_by_name(changes: dict[str, object], reason: str) -> None:
    with pytest.raises((NativeUnavailable, UnsupportedModel), match=reason):
        native(module_of(**changes))  # type: ignore[arg-type]


def test_a_draft_that_ends_outside_the_targets_vocabulary_is_cut_in_the_fused_round() -> None:
    draft = native(module_of(), verifies=False)
    target = native_of(
        module_of(vocab_size=100), 2, Limits(SLOTS, 120, 5, CHUNK, 100), RunnerIdentity("", "", "", "", ""), True, None
    )
    tokens = [t % 100 for t in sequence(30)]
    fill(target, 0, tokens[:-1])
    fill(draft, 0, tokens[:-2])
    (result,) = fused(target, draft)([fused_row(propose_row(0, 29, tuple(tokens[-2:]), 5, GREEDY))])
    whole = draft.propose([propose_row(0, 29, tuple(tokens[-2:]), 5, GREEDY)])[0].token_ids  # type: ignore[union-attr]
    known = next((i for i, token in enumerate(whole) if token >= 100), 5)
    assert result.proposal.token_ids == whole[:known] and known < 5  # type: ignore[union-attr]


def test_without_a_compiler_auto_falls_back_and_native_says_why(monkeypatch, tmp_path, caplog) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(compilation.shutil, "which", lambda name: None)
    source = find(str(model_folder(tmp_path / "m", seed=5)))
    with caplog.at_level("INFO", "tandem.engine"):
        runner = load_runner(source, Execution("cpu", "float32", 2), Shape(1, 64, 2))
    assert not isinstance(runner, NativeRunner)
    assert "no C++ compiler" in caplog.text
    with pytest.raises(ValueError, match="compile: native steps are not available: no C"):
        load_runner(source, Execution("cpu", "float32", 2, "native"), Shape(1, 64, 2))


def test_the_library_is_compiled_once(monkeypatch, tmp_path) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path))
    compiled: list[str] = []

    def compile_fake(compiler, flags, target):  # type: ignore[no-untyped-def]
        compiled.append(compiler)
        target.write_bytes(b"library")

    monkeypatch.setattr(compilation, "build", compile_fake)
    assert compilation.library_path() == compilation.library_path()
    assert len(compiled) == 1
    monkeypatch.setattr(compilation, "FLAGS", (*compilation.FLAGS, "-g"))
    compilation.library_path()
    assert len(compiled) == 2


def test_a_compiler_that_refuses_is_reported_in_one_line(monkeypatch, tmp_path) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path))
    monkeypatch.setattr(compilation, "FLAGS", (*compilation.FLAGS, "--no-such-flag"))
    with pytest.raises(LibraryMissing, match=r"failed: .*no-such-flag"):
        compilation.library_path()
