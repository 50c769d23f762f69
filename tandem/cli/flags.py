"""The options of the roles: one declaration for flags, types, defaults, help and tables of the pages."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tandem.cli.option import (
    ADAPTERS,
    ADDRESS,
    ADDRESSES,
    DIR,
    FILE,
    HOST,
    JSON,
    LIST,
    NAME,
    SECONDS,
    URL,
    auto_or_count,
    choice,
    flags_of,
    option,
    switch,
)
from tandem.cli.roles import (
    ALONE,
    APART,
    ASKING,
    CALLING,
    DRAFTING,
    EVERY,
    FUSING,
    GENERATING,
    LISTENING,
    LOADING,
    NXDI,
    OURS,
    PROMPTED,
    REAL,
    SERVERS,
    SESSIONS,
    SHAPED,
    TARGETS,
    TORCH,
    VERIFYING,
)

SETTLING = (*TARGETS, "settle")
ADAPTED = (*TARGETS, "prefill", *ALONE, "check")
MODELS = "models (default: the embedded SmolLM2-135M-Instruct)"
_CALLING = {"nxdi": (*ASKING, *SESSIONS)}  # a fused_target calls PrefillWorkers alone


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class Options:
    """`argv`: the parsed arguments; `given`: names of the options in them."""

    model: str | None = option("folder, .gguf file or hub id of its model", (*LOADING, "plan", "convert"), group=MODELS)
    target_model: str | None = option(
        "the target, for roles with two models; draft, draft_worker: for its tokenizer and embedding",
        ("target", "verify_target", *DRAFTING, "plan", "convert"),
    )
    draft_model: str | None = option("the draft model, or EAGLE-3 head", (*DRAFTING, "verify_draft", "plan", "convert"))
    draft: str = choice(
        "hybrid: lookup or model; eagle: head; ngram: lookup", "auto|hybrid|model|eagle|ngram", DRAFTING
    )
    hand_out_features: str = choice("layers whose hidden states remote heads get", "off|on|L1,L2,L3", ("target",), OURS)
    feature_context: int = option("positions of a prompt whose features an EAGLE-3 head gets", APART, default=256)
    adapters: ADAPTERS | None = option(
        "LoRA adapters of the target (PEFT's folders)", (*ADAPTED, "compile"), only={"torch": ADAPTED, "toy": ADAPTED}
    )
    draft_adapters: ADAPTERS | None = option("LoRA adapters of the draft", ("fused_target", *APART), OURS)
    backend: str = choice("nxdi: NxD Inference, on Neuron; toy: for tests", "torch|nxdi|toy", SHAPED)
    device: str = choice("where models run; neuron: Trn2, Trn3", "auto|cpu|cuda|neuron", LOADING, TORCH)
    dtype: str = choice("format of activations, KV cache and weights", "auto|float32|bfloat16|float16", SHAPED, REAL)
    weights: str = choice(
        "weights in memory; int8, q4: quantised once; as-stored: blocks of a .gguf file; auto: as stored if possible",
        "auto|bfloat16|float32|int8|q4|as-stored",
        LOADING,
        TORCH,
    )
    threads: int | None = option("CPU threads per model (default: by the CPUs)", LOADING, TORCH)
    compile: str = choice("native: C++ steps; off: module code", "auto|native|inductor|neuron|off", LOADING, TORCH)
    recertify: bool = switch("check native steps though they passed on this CPU before", LOADING, TORCH)
    untested_model: bool = switch("try a family of models that was never tested here (docs/models.md)", LOADING, TORCH)
    fast: bool = switch("use all step shapes, even if their results differ in the last bits", VERIFYING, REAL)
    sequence_length: int | None = option(
        "tokens per sequence, prompt included (default: the model's, as memory allows; else 512)",
        (*LOADING, "client", "fused_client", "plan"),
    )
    batch: int = option("sequences in memory (default: 4; with the model's own length: up to 8)", SHAPED, default=4)
    kv_cache_mb: int | None = option("MiB of KV shared by all slots (default: each has its full length)", SERVERS, OURS)
    speculation_length: str | None = option(
        "draft tokens per round; auto (default): by measurement. Clients: the server's choice",
        (*SERVERS, *ASKING, "compile", "plan"),
        also="gamma",
        metavar="auto|K",
    )
    max_speculation_length: int | None = option("a server's maximum (default: speculation_length; auto: 5)", SHAPED)
    rehearse: NAME | None = option("step times of another device: a preset or file (docs/comparison.md)", SERVERS, OURS)
    tp_degree: int = option(
        "cores that share a target (torch: one process per core)",
        SHAPED,
        REAL,
        only={"torch": (*TARGETS, "compile", "plan")},
        default=1,
    )
    cores: LIST | None = option("cores (on a CPU: CPUs) of this server, such as 0-3 (default: all)", LOADING, REAL)
    compiled_dir: DIR | None = option("compiled models, shared by servers (default: in ~/.cache/tandem)", LOADING, REAL)
    artifacts: DIR | None = option("store of compiled models; compile writes it, servers read it", LOADING, NXDI)
    compile_for: str | None = option("which of target, draft and fused to compile (default: all)", ("compile",))
    batch_buckets: LIST | None = option("batch sizes of graphs, such as 1,4 (default: by the device)", LOADING, TORCH)
    draft_buckets: LIST | None = option("draft lengths of graphs, such as 2,5 (default: by the device)", LOADING, TORCH)
    prefill_chunk: int | None = option("prompt tokens per step (default 64)", SHAPED, TORCH)
    neuron_config: JSON | None = option("fields of NeuronConfig, as JSON or a JSON file", LOADING, NXDI)
    draft_neuron_config: JSON | None = option("the NeuronConfig fields that differ for the draft", FUSING, NXDI)
    eagle: bool = switch("the draft is an EAGLE head of the target", FUSING, NXDI)
    pair: str = choice("load the pair as one greedy graph (fused), or two models", "both|fused|apart", FUSING, NXDI)

    host: HOST = option("address a server listens on", LISTENING, default="127.0.0.1", group="network")
    port: int = option("port of a server; 0: any free port", (*LISTENING, *ASKING), default=50051)
    target_host: HOST = option("HOST[:PORT]; drafting roles: a list", (*ASKING, "draft_worker"), default="127.0.0.1")
    target_port: int = option("port of its TargetVerifier", ("draft_worker",), default=50051)
    propose_only: bool = switch("have no target; only draft for targets that ask", ("draft_worker",))
    draft_host: ADDRESS | None = option("use drafts from the DraftWorker at this address", ("target",))
    draft_seconds: SECONDS = option("how long a draft may take", ("target",), default=5.0)
    pipeline: str = choice(
        "off: a round waits for its verdict; on: rounds are sent ahead; never-waiting: the target steps on by itself",
        "auto|off|on|never-waiting",
        ("draft", "draft_worker", "target"),
    )
    health_port: int | None = option("also answer health checks on this port, without TLS (for probes)", LISTENING)
    ready_file: FILE | None = option("file to write the address and process id to once ready", LISTENING)
    drain_seconds: SECONDS = option("how long running requests may finish after SIGTERM", LISTENING, default=30.0)
    step_seconds: str = option("a longer step counts as hung; auto: measured; 0: no limit", LISTENING, default="auto")
    lease_seconds: SECONDS = option("how long a session lives without a Verify", SESSIONS, default=60.0)
    connect_seconds: SECONDS | None = option("wait for a server (default: 0; drafting: 120)", (*ASKING, "draft_worker"))
    reconnect_seconds: SECONDS = option("retry what no server takes", (*ASKING, "draft_worker", "settle"), default=60.0)
    queue: int = option("requests that may wait for a slot", SERVERS, default=256)
    prefill: ADDRESSES | None = option("servers of --role prefill for long prompts (docs/sessions.md)", TARGETS, OURS)
    prefill_min_tokens: int = option("prompts with fewer new tokens are processed in place", TARGETS, OURS, default=256)
    prefill_timeout_s: SECONDS = option("wait for the next part; then the rest is in place", TARGETS, OURS, default=5.0)
    timeout: SECONDS | None = option("deadline of a request (default: none)", ASKING)

    http_port: int | None = option("HTTP port; 0: any free (default: none)", SERVERS, group="OpenAI (docs/openai.md)")
    http_host: HOST = option("address for that port", SERVERS, default="127.0.0.1")
    allowed_hosts: str = option("further Host names without a key; *: any", SERVERS, default="", metavar="NAME,...")

    tls_cert: FILE | None = option(
        "certificate (PEM, with its chain); turns TLS on", LISTENING, group="security of a server (docs/security.md)"
    )
    tls_key: FILE | None = option("its private key", LISTENING)
    tls_client_ca: FILE | None = option("require client certificates that one of these CAs signed", LISTENING)
    accept_tokens: FILE | None = option("require a token from this file of `identity token` lines", LISTENING)
    insecure: bool = switch("allow other machines without TLS: listen, send a token", (*LISTENING, *ASKING, "settle"))
    max_message_bytes: int | None = option("maximum size of a request (default: by the prompt, to 4 MiB)", LISTENING)
    max_prompt_bytes: int | None = option("maximum size of a text prompt (default: 64 per token of length)", SERVERS)
    max_sessions_per_identity: int | None = option("maximum open sessions of one caller (default: no limit)", SESSIONS)
    max_requests_per_identity: int | None = option("maximum requests of a caller at once (default: none)", LISTENING)
    prefix_sharing: str = choice("who shares cached prompts; identity: each alone", "identity|all|off", LISTENING)
    prefix_cache_mb: int | None = option(
        "MiB of them (default: a sequence per slot, to 1/16 of free memory)", LISTENING
    )
    settle: URL | None = option("openai=URL: an engine that writes answers to settle", SETTLING, OURS, also="engine")
    log_prompts: bool = switch("log prompts and answers; otherwise they are never logged", SERVERS)
    receipt_keys: DIR | None = option("key folder to sign with (default: none)", (*SERVERS, "settle"), group="receipts")
    receipt_key_days: float = option("a start replaces an older key, and publishes both", SERVERS, default=90.0)

    tls_ca: FILE | None = option("call with TLS, trusting these CAs", CALLING, only=_CALLING, group="outgoing calls")
    tls_client_cert: FILE | None = option("the caller's certificate, for a server with mTLS", CALLING, only=_CALLING)
    tls_client_key: FILE | None = option("its private key", CALLING, only=_CALLING)
    tls_server_name: NAME | None = option("name in the server's certificate, if not its host", CALLING, only=_CALLING)
    token_file: FILE | None = option("a file with the token to send with every call", CALLING, only=_CALLING)
    token_env: NAME | None = option("the environment variable with that token", CALLING, only=_CALLING)

    prompt: tuple[str, ...] = option(
        "a prompt; may be repeated (check: its file: text, or JSON token ids or a chat)",
        (*PROMPTED, "check"),
        default=(),
        group="requests (on a server: their defaults)",
    )
    prompt_text: FILE | None = option("a file with one prompt per line", PROMPTED, also="prompt_file")
    messages: FILE | None = option("a file with a chat in its place: a JSON list of OpenAI's messages", PROMPTED)
    chat: bool = switch("put each prompt into the model's chat template", PROMPTED)
    max_new_tokens: int | None = option("maximum to generate (default: a server's, else up to the length)", GENERATING)
    temperature: float | None = option("0 is greedy (default: a server's, else 0)", GENERATING)
    top_k: int | None = option("keep the k most likely tokens; 0 keeps all (default: a server's, else 0)", GENERATING)
    top_p: float | None = option("keep the likeliest up to this probability (default: a server's, else 1)", GENERATING)
    min_p: float | None = option("drop below this share of the likeliest (default: a server's, else 0)", GENERATING)
    seed: int | None = option("seed of the draws (default: a server's, else 0)", GENERATING)
    repetition_penalty: float | None = option(
        "divide logits of earlier tokens (default: a server's, else 1)", GENERATING
    )
    generation_config: str = choice("auto: defaults are those of generation_config.json", "auto|none", SERVERS)
    logprobs: int | None = option("print log-probabilities, and the N likeliest tokens of each (0 to 20)", PROMPTED)
    adapter: NAME | None = option("the server's LoRA adapter to use, or one of --adapters (default: none)", PROMPTED)
    rule: str = choice("how drafts are verified", "agreement|rejection", ASKING)
    drafts: str = choice("what drafts; auto: the server's choice", "auto|none|lookup|model|head", PROMPTED)
    stop: tuple[str, ...] = option("a string that ends the output; may be repeated", PROMPTED, default=())
    ignore_eos: bool = switch("go on past the end-of-sequence token", PROMPTED)
    quiet: bool = switch("print answers alone, without their figures", PROMPTED)
    receipts: DIR | None = option("ask for receipts of answers, written to this folder", ("client", "fused_client"))
    service: str | None = option("the service to call (default: whichever answers)", ("client",))

    metrics_port: int | None = option(
        "for Prometheus; 0: any (default: none)", LISTENING, group="docs/observability.md"
    )
    metrics_host: HOST = option("address for metrics", LISTENING, default="127.0.0.1")
    otlp_endpoint: URL | None = option("OTLP/gRPC collector for traces (default: none)", (*LISTENING, *PROMPTED))
    log_format: str = choice("json: one object per line", "text|json", EVERY)
    profile: bool = switch("write performance_*.csv and .json: a row for each request", (*SERVERS, *PROMPTED))
    debug: bool = switch("log more, and show tracebacks", EVERY)

    output: str | None = option("file; convert: empty folder", ("convert", "settle"), group="tools")
    input: FILE | None = option("requests, one per line; also without --input, after the role", ("settle",))
    report: str | None = option("the comparison.json to use", ("advise",))
    rtt_ms: float | None = option("round trip between client and target (default: the base's)", ("advise",))
    clients: int = option("clients of one target at once", ("advise",), default=1)

    receipt: FILE | None = option("the receipt; also without --receipt, after the role", ("check",))
    keys: FILE | None = option("the server's published keys, of /v1/receipt_keys (default: not compared)", ("check",))
    sample: int | None = option("draw only so many spans of 64 tokens again (default: all)", ("check",))
    beacon: str | None = option("public randomness, hexadecimal, that chooses them (default: chosen here)", ("check",))
    computation_receipt: str | None = option("write the receipt as a Computation Receipt", ("check",), metavar="FILE")
    margin: float = option("logits that a token may be off under other arithmetic", ("check",), default=0.5)
    signature_only: bool = switch("check signature and digests, without a model", ("check",))

    convert: str | None = option(
        "rescale FP8 weights; complete an EAGLE head (--draft_model); write safetensors",
        ("convert",),
        metavar="fp8|eagle|safetensors",
    )
    shard_gb: float = option("most GB of a file", ("convert",), default=5.0)

    instance: str | None = option("an instance type, or FAMILY:CHIPS such as trn3:4 (docs/trainium.md)", ("plan",))
    lnc: int | None = option("physical cores per logical one (default: the chip's, 2 on Trn2 and Trn3)", ("plan",))
    quantization: str = choice("of the target; auto: as config.json says", "auto|none|int8|f8e4m3|f8e5m2", ("plan",))
    modules_to_not_convert: LIST = option("modules to leave unquantized", ("plan",), default="lm_head")
    log: FILE | None = option("a log: name its known errors, cause and next command (docs/trainium.md)", ("doctor",))
    json: bool = switch("print JSON; of prompts, an object for each", (*PROMPTED, "plan", "doctor", "check"))

    role: str
    argv: tuple[str, ...]
    given: frozenset[str]

    @property
    def length(self) -> int:
        """Tokens per sequence of the role's models."""
        return self.sequence_length or 512

    @property
    def most_drafts(self) -> int:
        """Most draft tokens in a round. Raises ValueError."""
        k, most = auto_or_count("speculation_length", self.speculation_length), self.max_speculation_length
        if most is None:
            return 5 if k is None else k
        if k is not None and k > most:
            raise ValueError(f"speculation_length: {k} is above max_speculation_length {most}")
        return most

    def with_own_draft(self) -> Options:
        """A draft role's --model is its draft model; with n-gram lookup, the target, whose tokenizer it uses."""
        if self.draft_model or self.draft == "ngram" or self.role not in APART:
            return self
        return replace(self, draft_model=self.model)


FLAGS = flags_of(Options)
COMMON = (
    *("model", "target_model", "draft_model", "draft", "device", "batch", "sequence_length", "speculation_length"),
    *("host", "port", "http_port", "target_host", "draft_host", "prompt", "prompt_text", "max_new_tokens"),
    *("temperature", "seed", "receipt", "report", "instance", "output"),
)
"""Flags that --help shows first."""
