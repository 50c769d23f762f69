"""The options of models, measurement, advice and planning."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.cli.option import ADAPTERS, DIR, JSON, LIST, option, switch
from tandem.cli.role_names import (
    ALONE,
    APART,
    ASKING,
    DRAFTING,
    FUSING,
    LOADING,
    NXDI,
    OURS,
    REAL,
    SERVERS,
    SHAPED,
    TARGETS,
    TORCH,
    VERIFYING,
)

ADAPTED = (*TARGETS, "prefill", *ALONE, "accept")


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class Models:
    """The options of models, with which those of the roles begin."""

    model: str | None = option(
        "model folder, .gguf file or hub id of the role's own model",
        (*LOADING, "plan", "convert"),
        group="models (default: the embedded SmolLM2-135M-Instruct)",
    )
    target_model: str | None = option(
        "the target, for roles with two models; draft, draft_worker: whose tokenizer n-gram lookup uses, and an "
        "EAGLE-3 head, with the embedding",
        ("target", "verify_target", *DRAFTING, "plan", "convert"),
    )
    draft_model: str | None = option("the draft model, or EAGLE-3 head", (*DRAFTING, "verify_draft", "plan", "convert"))
    draft: str = option(
        "hybrid (prompt lookup, else the draft model), model, eagle (an EAGLE-3 head), or ngram (lookup alone); "
        "auto: hybrid if possible",
        DRAFTING,
        default="auto",
    )
    hand_out_features: str = option(
        "the hidden states after these layers go with verdicts to EAGLE-3 heads of draft workers; on: after those "
        "that heads usually read; not with graphs",
        ("target",),
        OURS,
        default="off",
        metavar="off|on|L1,L2,L3",
    )
    feature_format: str = option(
        "number format of the features that an EAGLE-3 head gets from its target",
        APART,
        default="bfloat16",
        metavar="bfloat16|int8",
    )
    feature_context: int = option(
        "an EAGLE-3 head gets the features of the last N positions of a prompt", APART, default=256
    )
    adapters: ADAPTERS | None = option(
        "LoRA adapters of the target, in PEFT's folders, which requests choose by name, OpenAI clients as the "
        "model (native steps and --compile off; nxdi: compiled in)",
        (*ADAPTED, "compile"),
        only={"torch": ADAPTED, "toy": ADAPTED},
    )
    draft_adapters: ADAPTERS | None = option(
        "LoRA adapters of the draft model: a request with the target's of that name has it too",
        ("fused_target", "draft_worker", "draft", "accept"),
        OURS,
    )
    adapter_root: DIR | None = option(
        "adapters in this folder's folders may be added while the server runs (RPC AddAdapter; default: none)",
        TARGETS,
        OURS,
    )
    adapter_admins: LIST | None = option(
        "the identities who may add and remove adapters, where callers have identities", TARGETS, OURS
    )
    backend: str = option("torch, nxdi (NxD Inference, on Neuron), or toy (for tests)", SHAPED, default="torch")
    device: str = option("where models run: auto, cpu, cuda or neuron (Trn2, Trn3)", LOADING, TORCH, default="auto")
    dtype: str = option(
        "number format of activations, KV cache and unquantised weights: auto, float32, bfloat16 or float16",
        SHAPED,
        REAL,
        default="auto",
    )
    weights: str = option(
        "how weights lie in memory: bfloat16, float32, int8 or q4 (quantised once, native steps only), as-stored "
        "(the blocks of a .gguf file as they are); auto: as the checkpoint has them if native steps can run that "
        "and no --dtype is given, else in the dtype",
        LOADING,
        TORCH,
        default="auto",
    )
    threads: int | None = option(
        "CPU threads per model (default: torch's choice, or a rank's share of the CPUs)", LOADING, TORCH
    )
    compile: str = option(
        "how steps run: native (C++), inductor or neuron (graphs), off (module code), auto",
        LOADING,
        TORCH,
        default="auto",
    )
    exact: bool = switch("use only step shapes whose results agree bit for bit (default)", VERIFYING, REAL)
    fast: bool = switch("use all step shapes, even if their results differ in the last bits", VERIFYING, REAL)
    sequence_length: int | None = option(
        "tokens per sequence, prompt included (servers: 512)", (*LOADING, "client", "fused_client", "plan")
    )
    batch: int = option("KV slots: sequences in memory at once", SHAPED, default=4)
    kv_cache_mb: int | None = option(
        "memory in MiB that the KV slots of all models share, so that there may be more of them than memory for "
        "all at full length; a request waits until its own length fits (native steps and --compile off on the "
        "CPU; default: every slot has its full length)",
        SERVERS,
        OURS,
    )
    speculation_length: str | None = option(
        "draft tokens per round; auto (default): the fastest by measurement. Clients: the server's choice",
        (*SERVERS, *ASKING, "accept", "compile", "plan"),
        also="gamma",
        metavar="auto|K",
    )
    max_speculation_length: int | None = option(
        "the maximum on a server (default: its speculation_length; for auto, 5)", SHAPED
    )
    tp_degree: int = option(
        "cores that share a target (torch: one process per core, started here or by torchrun)",
        SHAPED,
        REAL,
        only={"torch": (*TARGETS, "compile", "plan")},
        default=1,
    )
    cores: LIST | None = option(
        "cores of the device that this server uses, such as 0-3; on a CPU, CPUs (default: all)", LOADING, REAL
    )
    compiled_dir: DIR | None = option(
        "folder for compiled models, which servers may share (default: in ~/.cache/tandem)", LOADING, REAL
    )
    artifacts: DIR | None = option(
        "store of compiled models, such as a bucket mounted from S3; compile writes it, servers read it", LOADING, NXDI
    )
    compile_for: str | None = option("which of target, draft and fused to compile (default: all)", ("compile",))
    batch_buckets: LIST | None = option(
        "batch sizes to compile graphs for, such as 1,4 (default: depends on the device)", SHAPED, TORCH
    )
    draft_buckets: LIST | None = option(
        "draft lengths to compile graphs for, such as 2,5 (default: depends on the device)", SHAPED, TORCH
    )
    prefill_chunk: int | None = option("prompt tokens per step (default 64)", SHAPED, TORCH)
    neuron_config: JSON | None = option("fields of NeuronConfig, as JSON or a JSON file", LOADING, NXDI)
    draft_neuron_config: JSON | None = option("the NeuronConfig fields that differ for the draft", FUSING, NXDI)
    eagle: bool = switch("the draft is an EAGLE head of the target", FUSING, NXDI)
    pair: str = option(
        "load the pair as one graph, which is greedy, and apart for sampled requests; or as one of them, in half "
        "the memory",
        FUSING,
        NXDI,
        default="both",
        metavar="both|fused|apart",
    )
