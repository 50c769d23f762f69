"""KV slots that take memory as they are written: what they say they take, what they take, and the same bits."""

from __future__ import annotations

import mmap
import multiprocessing
import random
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.engine.compatibility import able
from tandem.runners.capabilities import MemoryOnDemand
from tandem.runners.protocol import Limits, RunnerIdentity
from tandem.runners.torch.kernels import ATTENTION, register_attention
from tandem.runners.torch.slot_model import TorchModel
from tandem.runners.torch.torch_runner import TorchRunner
from tandem.speculation.types import SamplingParams
from tests.rows import fill, verify_row
from tests.runners.modules import native_of
from tests.runners.test_native import module_of

VOCAB, SLOTS, CHUNK = 211, 4, 64
LONG = Limits(SLOTS, 8192, 3, CHUNK, VOCAB)
MEDIUM = Limits(SLOTS, 1024, 3, CHUNK, VOCAB)
SMALL = Limits(2, 96, 3, 16, VOCAB)
WHO = RunnerIdentity("tiny", "r", "d", "cpu", "native")
MIB = 2**20
GREEDY = SamplingParams()

pytestmark = pytest.mark.usefixtures("one_thread")


def native(limits: Limits, dtype: torch.dtype = torch.float32) -> Any:
    runner = native_of(module_of(dtype=dtype, max_position_embeddings=8192), 1, limits, WHO, True, None)
    runner.give_back(0)
    return runner


def with_features(limits: Limits, dtype: torch.dtype = torch.float32) -> Any:
    """A target whose hidden states a head reads."""
    runner = native(limits, dtype)
    runner.hand_out((1, 1, 2))
    return runner


def module_code(limits: Limits, dtype: torch.dtype = torch.float32) -> Any:
    register_attention()
    module = module_of(dtype=dtype, max_position_embeddings=8192)
    module.set_attn_implementation(ATTENTION)
    model = TorchModel(module, limits.slots, limits.max_length, limits.chunk, "cpu", on_demand=True)
    runner = TorchRunner(model, limits, WHO)
    runner.shapes = type(runner.shapes)((limits.max_draft + 1,), (1,), True, chunks=(limits.chunk,))
    return runner


LIMITS: dict[Callable[..., Any], Limits] = {native: LONG, with_features: LONG, module_code: MEDIUM}  # modules are slow
every_runner = pytest.mark.parametrize("make", [native, with_features, module_code])


def tokens_of(count: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=count)


def logits_after(runner: Any, slot: int, tokens: Sequence[int]) -> torch.Tensor:
    return torch.as_tensor(runner.verify_logits([verify_row(slot, len(tokens) - 1, tokens[-1], (), GREEDY)])[0])[0]


def resident(flags: str = "nh hg") -> int:
    """Bytes of memory in mappings that were asked for in small pages (nh) or large ones (hg)."""
    found = re.findall(r"^Rss: +(\d+) kB$.*?^VmFlags:([^\n]*)$", Path("/proc/self/smaps").read_text(), re.M | re.S)
    return 1024 * sum(int(rss) for rss, own in found if set(flags.split()) & set(own.split()))


@pytest.fixture(scope="module")
def process() -> Iterator[Executor]:
    """A new one: threads of libraries that earlier tests used have stacks in small pages, which grow, in a fork too."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), torch.set_num_threads, (1,)) as process:
        yield process


def takes_and_gives_back(make: Callable[..., Any], dtype: torch.dtype) -> None:
    runner = make(LIMITS[make], dtype)
    count = runner.limits.max_length * 3 // 8
    assert isinstance(able(runner).memory_on_demand, MemoryOnDemand)
    fill(runner, 0, tokens_of(count))  # which also starts the threads of the steps, whose stacks are in small pages
    runner.give_back(0)
    before = resident()
    for slot in range(SLOTS):
        fill(runner, slot, tokens_of(count))
    most, grown = SLOTS * runner.kv_bytes(count), resident() - before
    assert 0.8 * most < grown <= most
    assert most < 0.6 * SLOTS * runner.kv_bytes(runner.limits.max_length)
    for slot in range(1, SLOTS):
        runner.give_back(slot)
    assert resident() - before <= most // SLOTS
    runner.give_back(0)
    assert resident() - before < MIB // 16


@pytest.mark.each_value
@every_runner
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_slot_takes_at_most_what_it_says_and_gives_it_back(process: Executor, make: Any, dtype: torch.dtype) -> None:
    process.submit(takes_and_gives_back, make, dtype).result(100)


@every_runner
def test_what_is_given_back_is_neither_a_neighbours_nor_what_stands_before_it(make: Callable[..., Any]) -> None:
    runner, own, other = make(MEDIUM), tokens_of(400, 1), tokens_of(450, 2)
    fill(runner, 1, own)
    early = logits_after(runner, 1, own[:150])
    fill(runner, 1, own)
    late = logits_after(runner, 1, own)
    for slot in (0, 2):
        fill(runner, slot, other)
    runner.give_back(0)
    runner.give_back(2, 30)
    assert torch.equal(logits_after(runner, 1, own), late), "a neighbour's"
    runner.give_back(1, 200)
    assert torch.equal(logits_after(runner, 1, own[:150]), early), "what stands before it"
    fill(runner, 1, own)
    assert torch.equal(logits_after(runner, 1, own), late), "written again, it says something else"


@every_runner
def test_a_sequence_takes_what_it_may_write_and_no_more_than_a_slot(make: Callable[..., Any]) -> None:
    runner = make(LIMITS[make])
    most = runner.limits.max_length
    costs = [runner.kv_bytes(tokens) for tokens in (1, most // 8, most // 2, most)]
    assert costs == sorted(costs) and costs[-1] >= 1024 * most, "keys and values: 2 layers, 2 heads of 32 floats"
    assert costs[-1] <= runner.kv_bytes(10**6) == runner.kv_bytes(most + CHUNK)
    spare = {module_code: lambda: runner.model.slots.taken(CHUNK), with_features: lambda: (SLOTS + 1) * mmap.PAGESIZE}
    assert runner.capabilities.memory_on_demand.spare_bytes == spare.get(make, lambda: 0)()


@every_runner
def test_a_runner_has_no_memory_in_its_slots_once_it_is_warm(process: Executor, make: Any) -> None:
    process.submit(has_none_once_warm, make).result(100)


def has_none_once_warm(make: Callable[..., Any]) -> None:
    before = resident("nh")
    runner = make(SMALL)
    runner.warm_up()
    assert resident("nh") - before < MIB // 16
    fill(runner, 0, tokens_of(90))
    assert resident("nh") - before >= 1024 * 90
