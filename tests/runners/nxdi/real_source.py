"""Runs our backend against NxD Inference's own Python code on the CPU, with stand-ins for what is closed.

A program of its own, started by test_real_source.py: python real_source.py FOLDER. TANDEM_NXDI_SOURCE is put on the
path: NxDI's and NxD's `src` folders and transformers 4.57, joined by ":". Prints one JSON object. What it proves is the
contract and the maths of the modules; not compilation, kernels or a device.
"""

from __future__ import annotations

import asyncio
import importlib.abc
import importlib.machinery
import json
import logging
import os
import sys
import types
import unittest.mock
import warnings
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [*os.environ["TANDEM_NXDI_SOURCE"].split(os.pathsep), str(ROOT)]
warnings.simplefilter("ignore")
CLOSED = {"torch_neuronx", "torch_xla", "libneuronxla", "neuronxcc", "nki", "nkilib"}
ABSENT = {"boto3", "botocore", "tenacity", "islpy", "torchvision", "blobfile", "PIL"}
LENGTH, K = 96, 4
FP8_KEEPS = ["layers.0.mlp", "layers.0.self_attn", "layers.1.self_attn", "lm_head"]


# --- what is closed ---


class Anything(type):
    """A class that is whatever is asked of it: base, decorator, enum, subscript."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return anything(name)

    def __getitem__(cls, key: Any) -> Any:
        return cls

    def __or__(cls, other: Any) -> Any:
        return cls

    __ror__ = __or__


def anything(name: str) -> Any:
    def attribute(self: Any, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return anything(name)()

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else self

    members = {"__init__": lambda self, *a, **k: None, "__call__": call, "__getattr__": attribute}
    return Anything(name, (), members | {"__getitem__": lambda self, key: self})


class Closed(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, anything(name))
        return self.__dict__[name]


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        top = name.split(".")[0]
        if top in CLOSED or (top in ABSENT and importlib.machinery.PathFinder.find_spec(top) is None):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> Any:
        return Closed(spec.name)

    def exec_module(self, module: Any) -> None:
        """Nothing to run."""


sys.meta_path.insert(0, Finder())

import torch  # noqa: E402

from tests.runners.nxdi.real_models import (  # noqa: E402
    VOCABULARY,
    adapter,
    alone,
    as_5_writes,
    dequantised,
    eagle3_head,
    eagle_head,
    fp8,
    tiny,
)

vars(torch.classes)["neuron"] = types.SimpleNamespace(SPMDModel=object, LayoutTransformation=object)
import nki  # noqa: E402
import torch_neuronx  # noqa: E402
import torch_neuronx.utils  # noqa: E402
import torch_neuronx.xla_impl.ops as operators  # noqa: E402

torch_neuronx.__version__ = "2.9.0"
torch_neuronx.utils.get_platform_target = lambda: "trn1"
nki.jit = lambda function=None, **kwargs: function or (lambda inner: inner)
operators.Argmax = types.SimpleNamespace(apply=lambda t, dim, keepdim=False: torch.argmax(t, dim=dim, keepdim=keepdim))
operators.TopK = types.SimpleNamespace(apply=lambda t, k, dim=-1: torch.topk(t, k, dim=dim))
os.environ["NXD_CPU_MODE"] = "1"


# --- a device that runs the modules eagerly ---


class Graphs:
    """In ModelBuilder's place: every bucket is the module itself, called with exact shapes, states kept between."""

    def __init__(self, checkpoint_loader: Any = None, compiler_workdir: str = "", **kwargs: Any) -> None:
        self.checkpoint_loader, self.compiler_workdir = checkpoint_loader, compiler_workdir
        self.model_collection: dict[str, Any] = {}
        self.states: list[torch.Tensor] | None = None

    def add(self, key: str, model_instance: Any, example_inputs: Any, **kwargs: Any) -> Graphs:
        self.model_collection[key] = types.SimpleNamespace(model_instance=model_instance, examples=example_inputs)
        return self

    def trace(self, **kwargs: Any) -> Any:
        return object()

    def shard_checkpoint(self, serialize_path: str | None = None) -> list[Any]:
        return [self]

    def load(self) -> None:
        from neuronx_distributed.trace.trace import get_sharded_checkpoint

        for model in self.model_collection.values():
            model.model_instance.load_module()
            module = model.model_instance.module
            weights = {name: value.clone() for name, value in self.checkpoint_loader().items()}
            get_sharded_checkpoint(weights, module, 0, 1)
            missing, _ = module.load_state_dict(weights, strict=False)
            lacking = [name for name in missing if "past_key_values" not in name and "rank" not in name]
            lacking = [name for name in lacking if "hidden_states" not in name and "inv_freq" not in name]
            assert not lacking, f"no weights for {lacking[:4]}"

    def run(self, arguments: tuple[torch.Tensor, ...]) -> Any:
        shapes = [tuple(a.shape) for a in arguments]
        for model in self.model_collection.values():
            for rank, example in enumerate(model.examples):
                if [tuple(e.shape) for e in example[: len(shapes)]] == shapes:
                    return self._call(model.model_instance, rank, arguments)
        raise RuntimeError(f"Input shape {shapes} not found in input_shape_map")

    def _call(self, instance: Any, rank: int, arguments: tuple[torch.Tensor, ...]) -> Any:
        module, aliases = instance.get(rank)
        parameters, places = list(aliases), list(aliases.values())
        if self.states is None:
            self.states = [p.data.clone() for p in parameters]
        for parameter, state in zip(parameters, self.states, strict=True):
            parameter.data = state.clone()
        outputs = module(*arguments)
        outputs = list(outputs) if isinstance(outputs, list | tuple) else [outputs]
        for i, (place, old) in enumerate(zip(places, self.states, strict=True)):
            assert outputs[place].shape == old.shape, "a state changed its shape"
            self.states[i] = outputs[place].detach().clone()
        kept = [output for i, output in enumerate(outputs) if i not in set(places)]
        return kept[0] if len(kept) == 1 else kept


class Loaded(torch.nn.Module):
    """In torch.jit.load's place."""

    def __init__(self) -> None:
        super().__init__()
        self.nxd_model = self
        self.graphs: list[Graphs] = []

    def initialize(self, weights: list[Graphs], start_rank: Any) -> None:
        self.graphs[:] = weights
        self.graphs[0].load()

    def forward(self, *arguments: Any) -> Any:
        with torch.no_grad():
            return self.graphs[0].run(arguments[0] if isinstance(arguments[0], tuple) else arguments)


def prepare(folder: Path) -> None:
    """One process is the whole world, and compiled models are the modules themselves."""
    from neuronx_distributed.parallel_layers import parallel_state
    from neuronx_distributed_inference.models import application_base, model_wrapper

    torch.distributed.init_process_group("gloo", init_method=f"file://{folder / 'world'}", rank=0, world_size=1)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=1,
        pipeline_model_parallel_size=1,
        expert_model_parallel_size=1,
        skip_collective_init=True,
    )
    application_base.ModelBuilder = Graphs
    model_wrapper.ModelWrapper.is_neuron = lambda self: self.model is not None
    torch.jit.save = lambda model, path: Path(path).write_text("graphs")
    torch.jit.load = lambda path: Loaded()
    parallel_state.get_speculative_draft_group = lambda as_list=False: parallel_state.get_tensor_model_parallel_group()


# --- our backend ---


def field_names() -> dict[str, list[str]]:
    """What NxDI's configurations take, read from their source, beside our lists."""
    import inspect
    import re

    from neuronx_distributed_inference.models import config

    from tandem_nxdi.nxdi_settings import names

    named = names()

    def popped(cls: Any) -> set[str]:
        return set(re.findall(r'kwargs\.pop\(\s*"(\w+)"', inspect.getsource(cls)))

    pairs = {
        "NeuronConfig": (popped(config.NeuronConfig), named["neuron"]),
        "MoENeuronConfig": (
            popped(config.MoENeuronConfig) | {"capacity_factor", "glu_mlp"},
            named["mixture_of_experts"],
        ),
        "OnDeviceSamplingConfig": (popped(config.OnDeviceSamplingConfig), named["on_device_sampling_config"]),
        "LoraServingConfig": (set(inspect.signature(config.LoraServingConfig).parameters), named["lora_config"]),
    }
    return {name: sorted(theirs ^ set(ours)) for name, (theirs, ours) in pairs.items()}


async def scenarios(folder: Path) -> dict[str, Any]:
    from transformers import LlamaForCausalLM

    from tandem.checkpoints.adapter_files import AdapterChoice
    from tandem.checkpoints.locate import find
    from tandem.engine.batcher import Batcher
    from tandem.engine.engine import Engine
    from tandem.engine.generators import drafted_generator, fused_generator, plain_generator
    from tandem.engine.load_models import Loaded
    from tandem.engine.model_config import DraftChoice
    from tandem.engine.model_drafter import ModelDrafter
    from tandem.runners.backends import LoadRequest
    from tandem.runners.load_runner import Execution, Shape
    from tandem.runners.startup import Startup
    from tandem.speculation.types import GenerationRequest, SamplingParams
    from tandem.speculation.verification_mode import Pipeline
    from tandem_nxdi.backend import BACKEND
    from tandem_nxdi.nxdi_settings import NxdiSettings
    from tests.toy import ToyTokenizer

    target = tiny(folder / "target", "llama", 1)
    tiny(folder / "draft", "llama", 2, target, 0.05)
    other = tiny(folder / "other", "qwen3", 3)
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling |= {"original_max_position_embeddings": 64}
    turned = tiny(folder / "turned", "llama", 5, rope_theta=500.0, rope_scaling=scaling)
    as_5_writes(folder / "turned")
    eagle_head(folder / "head", folder / "target")
    greedy, sampled = SamplingParams(), SamplingParams(temperature=0.8, top_k=20, seed=5)
    prompts = [[7], [3, 9], [5, 6, 7, 8, 9, 10, 11, 12], list(range(1, 31))]
    execution = Execution(dtype="float32")

    def settings(given: dict[str, Any], eagle: bool = False, **more: Any) -> Any:
        return NxdiSettings(neuron_config=given, compiled_dir=str(folder / "compiled"), eagle=eagle, **more)

    def one(name: str, verifies: bool, slots: int = 3, batcher: Any = None, adapters: Any = (), **given: Any) -> Any:
        own, chosen = Shape(slots, LENGTH, K), settings(given, adapters=adapters)
        runner = BACKEND.load(find(str(folder / name)), LoadRequest(execution, own, chosen, verifies), Startup())
        runner.warm_up()
        return Loaded(Engine(runner, batcher or Batcher(name)), ToyTokenizer())

    def pair(
        target: str,
        draft: str,
        eagle: bool = False,
        slots: int = 3,
        apart: bool = False,
        own_draft: Any = None,
        **given: Any,
    ) -> Any:
        own, chosen = Shape(slots, LENGTH, K), settings(given, eagle, draft_neuron_config=own_draft or {})
        checkpoints = find(str(folder / target)), find(str(folder / draft))
        runners = BACKEND.load_pair(*checkpoints, LoadRequest(execution, own, chosen), Startup())
        runners[0].warm_up()
        batcher = Batcher("fused")
        loaded = [Loaded(Engine(runner, batcher), ToyTokenizer()) for runner in runners]
        unfused = None
        if apart:
            unfused = one(target, True, batcher=batcher), one(draft, False, batcher=batcher)
        return fused_generator(loaded[0], loaded[1], K, DraftChoice("model"), unfused=unfused)

    async def ask(generator: Any, prompt: list[int], sampling: Any, count: int, adapter: str = "") -> dict[str, Any]:
        request = GenerationRequest(
            token_ids=tuple(prompt),
            max_new_tokens=count,
            sampling=sampling,
            ignore_end_of_sequence=True,
            speculation_length=K,
            adapter=adapter,
        )
        tokens: list[int] = []
        async for event in generator.generate(request):
            tokens += getattr(event, "token_ids", ())
            stats = getattr(event, "stats", None)
        return {"tokens": tokens, "accepted": stats.accepted, "drafted": stats.drafted}

    async def compare(name: str, make: Any, model: Any, sampling: Any = greedy, total: int = 60) -> None:
        try:
            await compared(name, make(), model, sampling, total)
        except Exception as error:
            report[name] = {"failed": f"{type(error).__name__}: {error}"[:300]}

    async def compared(name: str, generator: Any, model: Any, sampling: Any, total: int) -> None:
        counts = [total - len(p) for p in prompts]
        got = await asyncio.gather(*(ask(generator, p, sampling, c) for p, c in zip(prompts, counts, strict=True)))
        expected = [alone(model, p, sampling, c) for p, c in zip(prompts, counts, strict=True)]
        report[name] = {
            "same": [g["tokens"] == e for g, e in zip(got, expected, strict=True)],
            "accepted": sum(g["accepted"] for g in got),
            "drafted": sum(g["drafted"] for g in got),
        }

    report: dict[str, Any] = {"fields": field_names()}
    verifier, drafter = one("target", True), one("draft", False)
    report["shapes"] = [verifier.runner.shapes.bit_exact, verifier.runner.shapes.note]

    def drafts(request: Any, stats: Any, times: Any) -> Any:
        return ModelDrafter(drafter.engine, request, VOCABULARY)

    await compare("plain, to the last position", lambda: plain_generator(verifier), target, total=LENGTH)
    await compare("plain, sampled", lambda: plain_generator(verifier), target, sampled)
    await compare(
        "drafted, greedy", lambda: drafted_generator(verifier, K, "draft", drafts, Pipeline.OFF), target, total=LENGTH
    )
    await compare(
        "drafted, sampled", lambda: drafted_generator(verifier, K, "draft", drafts, Pipeline.OFF), target, sampled
    )
    await compare("fused", lambda: pair("target", "draft"), target, total=LENGTH)
    await compare("sampled, apart from the fused graph", lambda: pair("target", "draft", apart=True), target, sampled)
    await compare("fused, its models loaded apart after it", lambda: pair("target", "draft", apart=True), target)
    as_integers = dequantised(target, folder / "integers")
    eight = {"quantized": True, "quantized_checkpoints_path": str(folder / "q8"), "modules_to_not_convert": ["lm_head"]}
    eight |= {"quantization_dtype": "int8", "quantization_type": "per_channel_symmetric"}
    await compare("quantised", lambda: plain_generator(one("target", True, **eight)), as_integers, total=LENGTH)
    await compare("fused, its target quantised", lambda: pair("target", "draft", **eight), as_integers)
    fused_qkv = eight | {"fused_qkv": True}
    await compare("fused, its target quantised with one QKV", lambda: pair("target", "draft", **fused_qkv), as_integers)
    await compare(
        "fused, quantised, its models apart", lambda: pair("target", "draft", apart=True, **eight), as_integers
    )
    told = {"own_draft": {"quantized": False}}
    await compare(
        "fused, quantised, its draft told not to be", lambda: pair("target", "draft", **told, **eight), as_integers
    )
    wide = tiny(folder / "wide", "llama", 8, intermediate_size=128)  # of 96, NxDI pads weights to 128 and scales not
    of_8_bits = fp8(wide, folder / "fp8")
    kernel = {"quantized_mlp_kernel_enabled": True, "modules_to_not_convert": FP8_KEEPS}
    await compare("the MLP kernel's FP8", lambda: plain_generator(one("fp8", True, **kernel)), of_8_bits, total=LENGTH)
    await compare("fused, the MLP kernel's FP8", lambda: pair("fp8", "draft", **kernel), of_8_bits)
    listed = {"modules_to_not_convert": [*FP8_KEEPS, "layers.1.mlp"]}
    await compare(
        "fused, FP8, its draft's own list", lambda: pair("fp8", "draft", own_draft=listed, **kernel), of_8_bits
    )
    with unittest.mock.patch("tandem_nxdi.backend.with_draft_kept", lambda build, draft: build):
        await compare("fused, FP8, its draft not listed", lambda: pair("fp8", "draft", **kernel), of_8_bits)
    await compare("plain after fused", lambda: plain_generator(one("target", True, fused_qkv=True)), target)
    await compare("fused, families differ", lambda: pair("other", "draft"), other)
    await compare("of transformers 5", lambda: plain_generator(one("turned", True)), turned, total=LENGTH)
    await compare("one line", lambda: plain_generator(one("target", True, slots=1)), target, total=LENGTH)
    await compare("fused, one line", lambda: pair("target", "draft", slots=1), target, total=LENGTH)
    seq_ids_mask = {"apply_seq_ids_mask": True}
    await compare("with a mask of sequence ids", lambda: pair("target", "draft", **seq_ids_mask), target)
    await compare("eagle", lambda: pair("target", "head", eagle=True), target)
    for kind in ("llama", "qwen3"):
        deep = tiny(folder / f"deep-{kind}", kind, 7, num_hidden_layers=8)
        eagle3_head(folder / f"head-{kind}", folder / f"deep-{kind}")
        beside = partial(pair, f"deep-{kind}", f"head-{kind}", eagle=True)
        await compare(f"eagle-3 beside {kind}", beside, deep, total=LENGTH)
    await compare("eagle-3, one line", partial(beside, slots=1), deep, total=LENGTH)
    if (folder / "trained").is_dir():
        learnt = LlamaForCausalLM.from_pretrained(folder / "trained" / "target").float().eval()
        await compare("eagle-3, trained here", lambda: pair("trained/target", "trained/draft", eagle=True), learnt)
    merged = {
        "": target,
        "red": adapter(folder / "red", target, 11, 2),
        "blue": adapter(folder / "blue", target, 12, 6),
    }
    choices = tuple(AdapterChoice(name, str(folder / name)) for name in ("red", "blue"))

    async def adapted(name: str, drafted: bool, sampling: Any) -> None:
        """Requests of two adapters and of none, at once; the fourth gets the line of another one."""
        loaded = one("target", True, adapters=choices)
        for choice in choices:
            await loaded.engine.adapters.add(choice, BACKEND.adapter)
        plain = plain_generator(loaded)
        generator = drafted_generator(loaded, K, "draft", drafts, Pipeline.OFF) if drafted else plain
        named = list(zip(prompts, ("red", "", "blue", "red"), strict=True))
        got = await asyncio.gather(*(ask(generator, p, sampling, 60 - len(p), who) for p, who in named))
        expected = [alone(merged[who], p, sampling, 60 - len(p)) for p, who in named]
        unlike = [
            tokens != alone(target, p, sampling, 60 - len(p)) for tokens, (p, _) in zip(expected, named, strict=True)
        ]
        report[name] = {"same": [g["tokens"] == e for g, e in zip(got, expected, strict=True)], "unlike": unlike}

    for way, drafted in (("plain", False), ("drafted", True)):
        await adapted(f"adapters, {way}, greedy", drafted, greedy)
        await adapted(f"adapters, {way}, sampled", drafted, sampled)
    buckets = {"token_generation_buckets": [32, 64, 96], "context_encoding_buckets": [16, 96]}
    await compare("buckets", lambda: plain_generator(one("other", True, **buckets)), other, total=LENGTH)
    greedily = {"on_device_sampling_config": {"do_sample": False}}
    await compare("tokens only", lambda: plain_generator(one("target", True, **greedily)), target)
    both = greedily | {"output_logits": True}
    await compare("sampled on the host", lambda: plain_generator(one("target", True, **both)), target, sampled)
    return report


def main() -> int:
    logging.disable(logging.WARNING)
    folder = Path(sys.argv[1])
    prepare(folder)
    if os.environ.get("TANDEM_RECORD_CONTRACT"):
        return record(folder)
    print(json.dumps(asyncio.run(scenarios(folder))))
    return 0


def record(folder: Path) -> int:
    """Writes contract.json anew from the calls of all scenarios."""
    from tests.runners.nxdi.contract import FILE, recorded

    signatures: set[str] = set()
    with recorded(signatures, 3, K + 1, VOCABULARY):
        asyncio.run(scenarios(folder))
    found = sorted((json.loads(one) for one in signatures), key=lambda one: json.dumps(one, sort_keys=True))
    FILE.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({"signatures": len(found)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
