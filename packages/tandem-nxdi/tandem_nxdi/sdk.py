"""Calls NxD Inference; the only module that imports it. By the source of NxDI 0.9.0.

Arguments go by keyword: `forward` has seq_ids second and attention_mask third (model_base.py).
"""

from __future__ import annotations

import copy
import importlib
import logging
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tandem_nxdi.checkpoint import ModelFacts, older_rope
from tandem_nxdi.compiled import CompiledModel
from tandem_nxdi.lines import ForwardCall
from tandem_nxdi.nxdi_runner import Array
from tandem_nxdi.quantisation import fp8_environment
from tandem_nxdi.shapes import Build, Kind

log = logging.getLogger("tandem.engine")
PACKAGE = "neuronx_distributed_inference"


class Application:
    """A loaded NeuronBaseForCausalLM: stateful, not thread-safe. `adapts`: calls choose adapters."""

    def __init__(self, module: Any, kind: Kind, adapts: bool = False) -> None:
        from neuronx_distributed_inference.modules.generation.sampling import prepare_sampling_params

        self.module, self._kind, self._params = module, kind, prepare_sampling_params
        self._adapts, self._running = adapts, threading.Lock()

    @property
    def dtype(self) -> str:
        return str(self.module.neuron_config.torch_dtype).removeprefix("torch.")

    def run(self, call: ForwardCall) -> Sequence[Array]:
        """Predictions of each row: logits [tokens, vocabulary], or ids [tokens]; of a fused model the accepted ids.

        Raises RuntimeError if the device fails or another thread is inside.
        """
        import torch

        if not self._running.acquire(blocking=False):
            raise RuntimeError("an NxDI model was called from two threads at once")
        try:
            rows = len(call.lines)
            more = {"adapter_ids": torch.tensor(call.adapters, dtype=torch.int32)} if self._adapts else {}
            columns, prior = torch.arange(call.mask_length)[None], torch.tensor(call.prior)[:, None]
            with torch.no_grad():
                output = self.module.forward(
                    input_ids=torch.tensor(call.input_ids, dtype=torch.int64),
                    position_ids=torch.tensor(call.position_ids, dtype=torch.int64),
                    attention_mask=(columns < prior).to(torch.int32),
                    seq_ids=torch.tensor(call.lines, dtype=torch.int64),
                    # made anew: NxDI rewrites them in place; top_k 1 is greedy, 0 would be uniform
                    sampling_params=self._params(rows, top_k=[1] * rows, top_p=[1.0] * rows, temperature=[1.0] * rows),
                    **more,
                )
            return self._answer(call, output)
        finally:
            self._running.release()

    def _answer(self, call: ForwardCall, output: Any) -> Sequence[Array]:
        if self._kind is Kind.FUSED:
            # [accepted (B, K), -1 behind; next ids; next mask; next positions (B, 1); ...]. Counted by positions: a
            # token id must not be mistaken for padding.
            accepted, following = _host(output.fused_outputs[0]), _host(output.fused_outputs[3])
            begins = (row[0] for row in call.position_ids)
            ends = following.reshape(-1)
            return [ids[: max(1, end - begin)] for ids, end, begin in zip(accepted, ends, begins, strict=False)]
        if (logits := output.logits) is not None:
            return [*_host(logits.float())]
        ids = _host(output.tokens)
        return [*(ids[:, None] if ids.ndim == 1 else ids)]


def start(build: Build, target: ModelFacts, draft: ModelFacts | None, wanted: CompiledModel) -> Application:
    """Compiles if necessary (minutes per bucket), loads the weights, runs every bucket once.

    Raises ValueError if NxDI refuses the configuration.
    """
    with _own_workdir(wanted.root):
        application = _open(build, target, draft)
        folder, compiled = wanted.ensure(lambda partial: _compile(application, build, partial))
        if compiled:
            log.info("compiled into %s", folder)
        application.load(str(folder))
        return Application(application, build.kind, bool(build.adapters))


def compile_only(
    build: Build, target: ModelFacts, draft: ModelFacts | None, wanted: CompiledModel
) -> tuple[Path, bool]:
    """Compiles unless there or in the store; returns the folder, and whether it compiled. Loads nothing."""
    with _own_workdir(wanted.root):
        application = _open(build, target, draft)
        return wanted.ensure(lambda partial: _compile(application, build, partial))


def _open(build: Build, target: ModelFacts, draft: ModelFacts | None) -> Any:
    os.environ.update(fp8_environment(build.neuron))  # before anything of NxDI is imported
    cls = _class(target)
    fields = copy.deepcopy(dict(build.neuron))
    try:
        neuron = _neuron_config(cls, fields)
        config = cls.get_config_cls()(neuron, load_config=_load_config(target.folder))
        if build.kind is Kind.FUSED:
            assert draft is not None
            config.fused_spec_config = _fused(cls, build, draft)
        else:
            cls._FUSED_PREFIX = ""  # class state: a fused model loaded before in this process leaves its own behind
        return cls(target.folder, config)
    except (AssertionError, TypeError) as error:
        raise ValueError(f"neuron_config: NxD Inference refuses it: {error}") from error


def _compile(application: Any, build: Build, folder: Path) -> None:
    """Compiles; quantizes the weights first if requested and not yet done."""
    path = build.neuron.get("quantized_checkpoints_path")
    if build.neuron.get("quantized") and not Path(str(path)).exists():
        type(application).save_quantized_state_dict(application.model_path, application.config)
    application.compile(str(folder))


def _fused(cls: Any, build: Build, draft: ModelFacts) -> Any:
    """The fused configuration as in inference_demo.py, with the draft's class if families differ."""
    from neuronx_distributed_inference.models.config import FusedSpecNeuronConfig

    own = _class(draft)
    assert build.draft is not None
    neuron = _neuron_config(own, copy.deepcopy(dict(build.draft)))
    if not build.eagle:
        neuron.speculation_length = 0
    neuron.enable_fused_speculation = False
    neuron.is_eagle_draft = build.eagle
    return FusedSpecNeuronConfig(
        cls._model_cls,
        draft_config=own.get_config_cls()(neuron, load_config=_load_config(draft.folder)),
        draft_model_path=draft.folder,
        draft_model_cls=None if own is cls else own,
    )


def _neuron_config(cls: Any, fields: dict[str, Any]) -> Any:
    quantization = fields.pop("kv_quant_config", None)
    if quantization is not None:
        read = _kv_quantization(quantization)
        fields |= {} if read is None else {"kv_quant_config": read}
    return cls.get_neuron_config_cls()(**fields)


def _kv_quantization(fields: Mapping[str, Any]) -> Any:
    """JSON names as NxD's enum members and dtypes; None on older SDKs, with kv_cache_quant alone."""
    import torch
    from neuronx_distributed.quantization import quantization_config as nxd

    if not hasattr(nxd, "KVQuantizationConfig"):
        if fields:
            raise ValueError("neuron_config: kv_quant_config is not in this NxD Inference; it has kv_cache_quant alone")
        return None
    read = dict(fields)
    for name in ("k_quant_method", "v_quant_method"):
        if isinstance(read.get(name), str):
            read[name] = nxd.QuantizationType(read[name])
    if isinstance(read.get("quant_dtype"), str):
        read["quant_dtype"] = getattr(torch, read["quant_dtype"])
    return nxd.KVQuantizationConfig(**read)


def _class(source: ModelFacts) -> Any:
    # One model's file, not utils.constants: that imports all of them, vision models too.
    module = importlib.import_module(f"{PACKAGE}.models.{source.model_type}.modeling_{source.model_type}")
    family = "".join(part.capitalize() for part in source.model_type.split("_"))
    return getattr(module, f"Neuron{family}ForCausalLM")


def _load_config(folder: str) -> Any:
    from neuronx_distributed_inference.utils.hf_adapter import load_pretrained_config

    rope = older_rope(folder)
    if not rope:
        return load_pretrained_config(folder)
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder)
    for name, value in rope.items():
        setattr(config, name, value)
    return load_pretrained_config(hf_config=config)


@contextmanager
def _own_workdir(root: Path) -> Iterator[None]:
    """A scratch folder of this process; compilations share /tmp/nxd_model by default.

    NxDI reads the variable to make, compile and load an application.
    """
    name = "BASE_COMPILE_WORK_DIR"
    given = os.environ.get(name)
    if given is None:
        os.environ[name] = f"{root / f'scratch-{os.getpid()}'}{os.sep}"
    try:
        yield
    finally:
        if given is None:
            del os.environ[name]


def _host(tensor: Any) -> Any:
    return tensor.detach().cpu().numpy()
