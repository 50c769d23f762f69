"""LoRA adapters on NxDI: requests of different adapters share steps, and a line keeps that of its prompt."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.checkpoints.adapter_files import AdapterChoice
from tandem.checkpoints.locate import CheckpointError
from tandem.engine.batcher import Batcher
from tandem.engine.engine import Engine
from tandem.engine.generators import plain_generator
from tandem.engine.load_models import Loaded
from tandem.engine.sequences import LocalVerifier
from tandem.runners.protocol import RowFailed
from tandem.speculation.types import GenerationRequest, Request, SamplingParams
from tandem_nxdi.backend import BACKEND
from tandem_nxdi.nxdi_runner import NxdiRunner
from tests.adapters import write_adapter
from tests.rows import verify_row
from tests.runners.nxdi.runners import SHAPE, Bench, application, bench, drafted  # noqa: F401
from tests.support import GREEDY, SAMPLED, answer, ids, oracle
from tests.toy import ToyTokenizer

NAMES = ("", "red", "blue")
PROMPTS = {"": b"x", "red": b"ab", "blue": b"a longer prompt, of thirty tokens"}
BOTH = pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])


def choice(folder: Path, name: str, rank: int = 2, **fields: Any) -> AdapterChoice:
    """An adapter's folder. The stand-in knows it by its name, and reads nothing of it."""
    path = "base_model.model.model.layers.0.self_attn.q_proj"
    tensors = {f"{path}.lora_A.weight": torch.ones(rank, 8), f"{path}.lora_B.weight": torch.ones(8, rank)}
    return AdapterChoice(name, str(write_adapter(folder / name, tensors, **{"r": rank, **fields})))


def choices(folder: Path) -> tuple[AdapterChoice, ...]:
    return choice(folder, "red"), choice(folder, "blue", rank=6)


async def target_of(bench: Bench, folder: Path) -> Loaded:  # noqa: F811
    """A target that was started with both adapters, which requests may name."""
    chosen = choices(folder)
    engine = Engine(bench.target(adapters=chosen), Batcher("test"))
    for each in chosen:
        await engine.adapters.add(each, BACKEND.adapter)
    return Loaded(engine, ToyTokenizer())


def asking(name: str, sampling: SamplingParams) -> GenerationRequest:
    total = SHAPE.max_length - len(PROMPTS[name])
    return ids(PROMPTS[name], total, sampling=sampling, ignore_end_of_sequence=True, adapter=name)


def truth(name: str, sampling: SamplingParams) -> tuple[int, ...]:
    count = SHAPE.max_length - len(PROMPTS[name])
    return oracle(PROMPTS[name], sampling, count, past_the_end=True, adapter=name)


@pytest.mark.each_value
@pytest.mark.parametrize("drafts", [False, True], ids=["plain", "drafted"])
@BOTH
async def test_requests_of_different_adapters_share_steps_and_say_what_each_says_alone(
    bench: Bench,  # noqa: F811
    sampling: SamplingParams,
    drafts: bool,
    tmp_path: Path,
) -> None:
    target, draft = await target_of(bench, tmp_path), Engine(bench.draft(0.3), Batcher("d"))
    generator = drafted(target, draft) if drafts else plain_generator(target)
    names = (*NAMES, "red", "", "blue")
    answers = await asyncio.gather(*(answer(generator.generate, asking(name, sampling)) for name in names))
    for name, got in zip(names, answers, strict=True):
        assert got.token_ids == truth(name, sampling)


async def test_the_target_is_compiled_with_room_for_all_and_told_each_lines_adapter(
    bench: Bench,  # noqa: F811
    tmp_path: Path,
) -> None:
    await target_of(bench, tmp_path)
    assert application().neuron_config.given["lora_config"] == {
        "max_loras": 2,
        "max_lora_rank": 6,
        "enable_base_model_only": True,
        "batch_size": SHAPE.slots,
        "lora_ckpt_paths": {"red": str(tmp_path / "red"), "blue": str(tmp_path / "blue")},
        "target_modules": ["q_proj"],
    }
    assert all(len(call["adapter_ids"]) == len(call["seq_ids"]) for call in application().calls)


def test_without_adapters_nothing_of_them_is_passed(bench: Bench) -> None:  # noqa: F811
    runner = bench.target()
    assert "names none" in runner.capabilities.adapters
    assert all("adapter_ids" not in call for call in application().calls)
    with pytest.raises(KeyError):
        runner.verify([verify_row(0, 0, 1, (), GREEDY, adapter=1)])


async def test_a_line_that_was_encoded_with_another_adapter_is_filled_again(
    bench: Bench,  # noqa: F811
    tmp_path: Path,
) -> None:
    target = await target_of(bench, tmp_path)
    engine, prompt = target.engine, list(PROMPTS["blue"])
    verifiers = {name: LocalVerifier(engine, Request(GREEDY, adapter=name)) for name in NAMES}
    for verifier in verifiers.values():
        await verifier.open(prompt)
    slot = verifiers["red"].sequence.slot  # type: ignore[union-attr]
    assert isinstance(engine.runner, NxdiRunner)
    (failed,) = engine.runner.verify([verify_row(slot, len(prompt) - 1, prompt[-1], (), GREEDY)])
    assert isinstance(failed, RowFailed) and "was encoded with adapter 1, and 0 is asked for" in str(failed)
    for name, verifier in verifiers.items():
        expected = oracle(prompt, GREEDY, 1, past_the_end=True, adapter=name)
        assert (await verifier.verify(prompt, ())).token_ids == expected
        await verifier.close()


async def test_none_is_added_while_it_runs(bench: Bench, tmp_path: Path) -> None:  # noqa: F811
    engine = (await target_of(bench, tmp_path)).engine
    said = "green: NxD Inference holds the adapters that it was started with: red, blue"
    with pytest.raises(ValueError, match=said):
        await engine.adapters.add(choice(tmp_path, "green"), BACKEND.adapter)
    other = AdapterChoice("red", choice(tmp_path, "blue-too", rank=6).source)
    with pytest.raises(ValueError, match="red: NxD Inference holds"):
        await engine.adapters.add(other, BACKEND.adapter)
    with pytest.raises(ValueError, match="names none"):
        await Engine(bench.draft(), Batcher("d")).adapters.add(choices(tmp_path)[0], BACKEND.adapter)


@pytest.mark.parametrize(
    ("fields", "given", "said"),
    [
        ({"alpha_pattern": {"q_proj": 3}}, {}, "red: alpha_pattern is not served"),
        ({"use_dora": True}, {}, "DoRA"),
        ({}, {"max_loras": 3}, "lora_config has max_loras, which --adapters determines"),
        ({}, {"lora_ckpt_paths": ["a:b"]}, "lora_config has lora_ckpt_paths"),
        ({}, {"max_lora_rank": 1}, "max_lora_rank 1 is below 2"),
    ],
)
def test_what_nxdi_would_not_read_is_refused_before_anything_compiles(
    bench: Bench,  # noqa: F811
    fields: dict[str, Any],
    given: dict[str, Any],
    said: str,
    tmp_path: Path,
) -> None:
    neuron = {"lora_config": given} if given else {}
    with pytest.raises((ValueError, CheckpointError), match=said):
        bench.target(adapters=(choice(tmp_path, "red", **fields),), neuron_config=neuron)


def test_a_fused_graph_takes_none_and_is_refused_by_name(bench: Bench, tmp_path: Path) -> None:  # noqa: F811
    with pytest.raises(ValueError, match=r"adapters: NxD Inference passes none to a fused graph .*; use --pair apart"):
        bench.pair(adapters=choices(tmp_path))


def test_other_adapters_are_another_compiled_folder(bench: Bench, tmp_path: Path) -> None:  # noqa: F811
    from tandem.checkpoints.locate import find
    from tandem.runners.backends import LoadRequest
    from tandem.runners.load_runner import Execution

    def compiled(*chosen: AdapterChoice) -> str:
        settings = bench.settings({"adapters": chosen})
        (line,) = BACKEND.compile(find(str(bench.model())), None, LoadRequest(Execution(), SHAPE, settings), "target")
        return line

    red = choice(tmp_path, "red")
    first, again = compiled(red), compiled(red)
    assert ": compiled" in first and ": there already" in again
    folder = Path(red.source) / "adapter_config.json"
    folder.write_text(json.dumps({**json.loads(folder.read_text()), "lora_alpha": 32}))
    assert ": compiled" in compiled(red) and ": compiled" in compiled()
