"""Configures a role's models by the options."""

from __future__ import annotations

from tandem.checkpoints.adapter_files import adapter_choices
from tandem.cli.flags import Options
from tandem.cli.option import auto_or_count, built, numbers, split_list
from tandem.engine.model_config import DraftChoice, ModelConfig
from tandem.host.device_times import times_named
from tandem.launch import LAUNCH
from tandem.runners.backends import BackendSettings, backend_named
from tandem.runners.load_runner import CHUNK, Execution, Shape


def model_config(args: Options, model: str | None) -> ModelConfig:
    nxdi = args.backend == "nxdi"  # it shards models among cores itself
    rows, drafts = numbers("batch_buckets", args.batch_buckets, int), numbers("draft_buckets", args.draft_buckets, int)
    shape = Shape(
        slots=args.batch,
        max_length=args.length,
        max_draft=args.most_drafts,
        chunk=CHUNK if args.prefill_chunk is None else args.prefill_chunk,
        batch_buckets=rows,
        draft_buckets=drafts,
    )
    return ModelConfig(
        execution=built(
            Execution, args, exact=not args.fast, compiled=args.compiled_dir, tp_degree=1 if nxdi else args.tp_degree
        ),
        shape=shape,
        model=model,
        draft=DraftChoice(args.draft, args.draft_model, args.feature_context),
        backend=args.backend,
        default_k=auto_or_count("speculation_length", args.speculation_length),
        settings=nxdi_settings(args, shape) if nxdi else None,
        adapters=adapter_choices(args.adapters),
        draft_adapters=adapter_choices(args.draft_adapters, "draft_adapters"),
        hand_out_features=layers_handed_out(args.hand_out_features),
        rehearsal=None if args.rehearse is None else times_named(args.rehearse),
    )


def layers_handed_out(given: str) -> tuple[int, ...] | None:
    """The layers after which a target emits features. None: no features; empty: the default layers."""
    if given in ("off", "on"):
        return None if given == "off" else ()
    if not (layers := numbers("hand_out_features", given, int)):
        raise ValueError("hand_out_features: no layer is named")
    return layers


def nxdi_settings(args: Options, shape: Shape) -> BackendSettings:
    backend_named("nxdi")  # or says what is missing
    from tandem_nxdi.nxdi_settings import NxdiSettings, read_neuron_config
    from tandem_nxdi.shapes import check_settings

    settings = built(
        NxdiSettings,
        args,
        neuron_config=read_neuron_config(args.neuron_config),
        draft_neuron_config=read_neuron_config(args.draft_neuron_config, "draft_neuron_config"),
        adapters=adapter_choices(args.adapters),
    )
    check_settings(args.role == "fused_target" or "fused" in split_list(args.compile_for), shape, settings)
    return settings


def command(args: Options) -> tuple[str, ...]:
    """The command that starts this role in another process."""
    return (*LAUNCH, *args.argv)
