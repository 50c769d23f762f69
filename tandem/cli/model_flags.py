"""The flags of models, measurement, advice and planning: rows of the table in tandem/cli/flags.py."""

from __future__ import annotations

from tandem.cli.flag_row import (
    ALONE,
    ASKING,
    DRAFTING,
    LOADING,
    NXDI,
    PREFILL,
    REAL,
    SERVERS,
    SHARED,
    TORCH,
    Group,
    flag,
    switch,
)

DRAFT_HELP = (
    "hybrid (prompt lookup, else the draft model), model, eagle (an EAGLE-3 head), or ngram (lookup alone); auto:"
    " hybrid if possible"
)

_ADAPTED = ("target", "fused_target", PREFILL, *ALONE, "accept")

MODELS = Group(
    "models (default: the embedded SmolLM2-135M-Instruct)",
    (
        flag(
            "model", to=(*LOADING, "plan", "convert"), help="model folder, .gguf file or hub id of the role's own model"
        ),
        flag(
            "target_model",
            to=("target", "verify_target", *DRAFTING, "plan", "convert"),
            help="the target, for roles with two models; draft, draft_worker: whose tokenizer n-gram lookup uses,"
            " and an EAGLE-3 head, with the embedding",
        ),
        flag("draft_model", to=(*DRAFTING, "verify_draft", "plan", "convert"), help="the draft model, or EAGLE-3 head"),
        flag("draft", to=DRAFTING, default="auto", help=DRAFT_HELP),
        flag(
            "hand_out_features",
            to=("target",),
            backends=("torch", "toy"),
            default="off",
            metavar="off|on|L1,L2,L3",
            help="the hidden states after these layers go with verdicts to EAGLE-3 heads of draft workers; on: after"
            " those that heads usually read; not with graphs (default: off)",
        ),
        flag(
            "feature_format",
            to=("draft", "draft_worker"),
            default="bfloat16",
            metavar="bfloat16|int8",
            help="number format of the features that an EAGLE-3 head gets from its target (default: bfloat16)",
        ),
        flag(
            "feature_context",
            to=("draft", "draft_worker"),
            type=int,
            default=256,
            metavar="N",
            help="an EAGLE-3 head gets the features of the last N positions of a prompt (default: 256)",
        ),
        flag(
            "adapters",
            to=(*_ADAPTED, "compile"),
            only={"torch": _ADAPTED, "toy": _ADAPTED},
            metavar="NAME=DIR,...",
            help="LoRA adapters of the target, in PEFT's folders, which requests choose by name, OpenAI clients"
            " as the model (native steps and --compile off; nxdi: compiled in)",
        ),
        flag(
            "draft_adapters",
            to=("fused_target", "draft_worker", "draft", "accept"),
            backends=("torch", "toy"),
            metavar="NAME=DIR,...",
            help="LoRA adapters of the draft model: a request with the target's of that name has it too",
        ),
        flag(
            "adapter_root",
            to=("target", "fused_target"),
            backends=("torch", "toy"),
            metavar="DIR",
            help="adapters in this folder's folders may be added while the server runs (RPC AddAdapter; default: none)",
        ),
        flag(
            "adapter_admins",
            to=("target", "fused_target"),
            backends=("torch", "toy"),
            metavar="LIST",
            help="the identities who may add and remove adapters, where callers have identities",
        ),
        flag(
            "branches",
            to=("draft", "draft_worker"),
            default="off",
            metavar="off|on",
            help="drafts for a target that never waits also follow second choices, where that is expected to pay "
            "(default: off)",
        ),
        flag(
            "backend",
            to=(*LOADING, "plan"),
            default="torch",
            help="torch, nxdi (NxD Inference, on Neuron), or toy (for tests)",
        ),
        flag(
            "device", to=LOADING, backends=TORCH, default="auto", help="torch: auto, cpu, cuda or neuron (Trn2, Trn3)"
        ),
        flag(
            "dtype",
            to=(*LOADING, "plan"),
            backends=REAL,
            default="auto",
            help="number format of activations, KV cache and unquantised weights: auto, float32, bfloat16 or float16",
        ),
        flag(
            "weights",
            to=LOADING,
            backends=TORCH,
            default="auto",
            help="how weights lie in memory: bfloat16, float32, int8 or q4 (quantised once, native steps only),"
            " as-stored (the blocks of a .gguf file as they are); auto: as the checkpoint has them if native steps can"
            " run that and no --dtype is given, else in the dtype",
        ),
        flag(
            "threads",
            to=LOADING,
            backends=TORCH,
            type=int,
            help="CPU threads per model (default: torch's choice, or a rank's share of the CPUs)",
        ),
        flag(
            "compile",
            to=LOADING,
            backends=TORCH,
            default="auto",
            help="how steps run: native (C++), inductor or neuron (graphs), off (module code), auto",
        ),
        switch(
            "exact",
            to=("target", "fused_target", *ALONE, "accept"),
            backends=REAL,
            help="use only step shapes whose results agree bit for bit (default)",
        ),
        switch(
            "fast",
            to=("target", "fused_target", *ALONE, "accept"),
            backends=REAL,
            help="use all step shapes, even if their results differ in the last bits",
        ),
        flag(
            "sequence_length",
            to=(*LOADING, "client", "fused_client", "plan"),
            type=int,
            help="tokens per sequence, prompt included (servers: 512)",
        ),
        flag(
            "batch",
            to=(*LOADING, "plan"),
            type=int,
            default=4,
            help="KV slots: sequences in memory at once (default 4)",
        ),
        flag(
            "kv_cache_mb",
            to=SERVERS,
            backends=("torch", "toy"),
            type=int,
            help="memory in MiB that the KV slots of all models share, so that there may be more of them than memory"
            " for all at full length; a request waits until its own length fits (native steps and --compile off on the"
            " CPU; default: every slot has its full length)",
        ),
        flag(
            "speculation_length",
            "gamma",
            to=(*SERVERS, *ASKING, "accept", "compile", "plan"),
            metavar="auto|K",
            help="draft tokens per round; auto (default): the fastest by measurement. Clients: the server's choice",
        ),
        flag(
            "max_speculation_length",
            to=(*LOADING, "plan"),
            type=int,
            help="the maximum on a server (default: its speculation_length; for auto, 5)",
        ),
        flag(
            "tp_degree",
            to=(*LOADING, "plan"),
            backends=REAL,
            only={"torch": (*SHARED, "plan")},
            type=int,
            default=1,
            help="cores that share a target (torch: one process per core, started here or by torchrun)",
        ),
        flag(
            "cores",
            to=LOADING,
            backends=REAL,
            help="cores of the device that this server uses, such as 0-3; on a CPU, CPUs (default: all)",
        ),
        flag(
            "compiled_dir",
            to=LOADING,
            backends=REAL,
            help="folder for compiled models, which servers may share (default: in ~/.cache/tandem)",
        ),
        flag(
            "artifacts",
            to=LOADING,
            backends=NXDI,
            metavar="DIR",
            help="nxdi: store of compiled models, such as a bucket mounted from S3; compile writes it, servers read it",
        ),
        flag(
            "compile_for",
            to=("compile",),
            help="compile: which of target, draft and fused to compile (default: all)",
        ),
        flag(
            "batch_buckets",
            to=(*LOADING, "plan"),
            backends=TORCH,
            help="batch sizes to compile graphs for, such as 1,4 (default: depends on the device)",
        ),
        flag(
            "draft_buckets",
            to=(*LOADING, "plan"),
            backends=TORCH,
            help="draft lengths to compile graphs for, such as 2,5 (default: depends on the device)",
        ),
        flag(
            "prefill_chunk",
            to=(*LOADING, "plan"),
            backends=TORCH,
            type=int,
            help="prompt tokens per step (default 64)",
        ),
        flag(
            "neuron_config",
            to=LOADING,
            backends=NXDI,
            metavar="JSON",
            help="nxdi: fields of NeuronConfig, as JSON or a JSON file",
        ),
        flag(
            "draft_neuron_config",
            to=("fused_target", "compile"),
            backends=NXDI,
            metavar="JSON",
            help="nxdi, fused_target: the NeuronConfig fields that differ for the draft",
        ),
        switch(
            "eagle",
            to=("fused_target", "compile"),
            backends=NXDI,
            help="nxdi, fused_target: the draft is an EAGLE1 head of the target",
        ),
        flag(
            "pair",
            to=("fused_target", "compile"),
            backends=NXDI,
            default="both",
            metavar="both|fused|apart",
            help="nxdi, fused_target: load the pair as one graph, which is greedy, and apart for sampled requests"
            " (default: both); or as one of them, in half the memory",
        ),
    ),
)

FIGURES = Group(
    "measuring and advice (roles accept and advise)",
    (
        flag(
            "output",
            to=("accept", "convert"),
            help="accept: file to write the figures to, as JSON; convert: empty folder to write to",
        ),
        flag("report", to=("advise",), help="advise: the comparison.json, or prefill_apart.json, to use"),
        flag(
            "rtt_ms",
            to=("advise",),
            type=float,
            help="advise: round trip between client and target (default: as measured)",
        ),
        flag(
            "link_mbps",
            to=("advise",),
            type=float,
            help="advise, on prefill apart: bandwidth between target and PrefillWorker in Mbit/s (default: no limit)",
        ),
        flag(
            "clients", to=("advise",), type=int, default=1, help="advise: concurrent clients of one target (default 1)"
        ),
    ),
)

CONVERTING = Group(
    "converting checkpoints (role convert, docs/trainium-nxdi.md)",
    (
        flag(
            "convert",
            to=("convert",),
            metavar="fp8|eagle|safetensors",
            help="convert: rescale FP8 weights for Neuron; give an EAGLE-1 head (--draft_model) its target's output"
            " matrix (--target_model); or write safetensors",
        ),
        flag("shard_gb", to=("convert",), type=float, default=5.0, help="convert: most GB of a file (default 5)"),
    ),
)

PLANNING = Group(
    "planning (roles plan and doctor; plan also takes the models' flags)",
    (
        flag(
            "instance",
            to=("plan",),
            help="plan: an instance type such as trn2.48xlarge, or FAMILY:CHIPS such as trn3:4",
        ),
        flag(
            "lnc",
            to=("plan",),
            type=int,
            help="plan: physical cores per logical one (default: the chip's, 2 on Trn2 and Trn3)",
        ),
        flag(
            "core_count",
            to=("plan",),
            type=int,
            help="plan: cores for each placement (default: tp_degree, or as few as suffice)",
        ),
        flag(
            "context_buckets",
            to=("plan",),
            metavar="LIST",
            help="plan, nxdi: prompt lengths compiled, as in 1024,2048; or auto",
        ),
        flag(
            "decode_buckets",
            to=("plan",),
            metavar="LIST",
            help="plan: cache lengths compiled (default: sequence_length); or auto",
        ),
        flag(
            "quantization",
            to=("plan",),
            default="auto",
            help="plan: quantization of the target: none, int8, f8e4m3, f8e5m2, or auto (as config.json says)",
        ),
        flag(
            "modules_to_not_convert",
            to=("plan",),
            default="lm_head",
            metavar="LIST",
            help="plan: modules to leave unquantized (default lm_head)",
        ),
        flag(
            "compile_minutes",
            to=("plan",),
            type=float,
            default=10.0,
            help="plan: minutes to assume for compiling a graph (default 10)",
        ),
        switch("json", to=("plan", "doctor"), help="plan, doctor: print JSON"),
    ),
)
