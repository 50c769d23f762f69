"""The options of the roles: one declaration for flags, types, defaults, help and tables of the pages."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tandem.cli.model_flags import Models
from tandem.cli.option import ADDRESS, ADDRESSES, FILE, HOST, LIST, NAME, SECONDS, URL, flags_of, option, switch
from tandem.cli.role_names import (
    APART,
    ASKING,
    CALLING,
    EVERY,
    GENERATING,
    LISTENING,
    OURS,
    PROMPTED,
    PROMPTS,
    SERVERS,
    SERVING,
    SESSIONS,
    TARGETS,
)
from tandem.cli.values import auto_or_count

_CALLING = {"nxdi": (*ASKING, *SESSIONS)}  # a fused_target calls PrefillWorkers alone


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class Options(Models):
    """The parsed options of a role. `argv`: the arguments that were parsed; `given`: the names of those options."""

    host: HOST = option(
        "address a server listens on; 127.0.0.1 is for this machine only", SERVING, default="127.0.0.1", group="network"
    )
    port: int = option(
        "port a server listens on, or a client connects to; 0: any free port", (*LISTENING, *ASKING), default=50051
    )
    target_host: HOST = option(
        "the server, HOST or HOST:PORT; draft, draft_worker: a comma-separated list, for failover",
        (*ASKING, "draft_worker"),
        default="127.0.0.1",
    )
    target_port: int = option("port of its TargetVerifier", ("draft_worker",), default=50051)
    propose_only: bool = switch("have no target; only draft for targets that ask", ("draft_worker",))
    draft_host: ADDRESS | None = option("use drafts from the DraftWorker at this address", ("target",))
    draft_seconds: SECONDS = option("how long a draft may take", ("target",), default=5.0)
    pipeline: str = option(
        "with a remote target or draft: off: each round waits for its verdict; on: rounds are sent before "
        "verdicts arrive; never-waiting: the target steps on by itself; auto: what is likely fastest",
        ("draft", "draft_worker", "target"),
        default="auto",
        metavar="off|on|never-waiting|auto",
    )
    health_port: int | None = option("also answer health checks on this port, without TLS (for probes)", LISTENING)
    engine_port: int | None = option(
        "port for the gateway of OpenAI clients (docs/openai.md); 0: any free port (default: none)", SERVERS
    )
    engine_host: HOST = option("address for that port, which has neither TLS nor tokens", SERVERS, default="127.0.0.1")
    ready_file: FILE | None = option("file to write the address and process id to once ready", SERVING)
    drain_seconds: SECONDS = option("how long running requests may finish after SIGTERM", SERVING, default=30.0)
    step_seconds: str = option(
        "a longer device step counts as hung; auto: from measured times; 0: no limit", LISTENING, default="auto"
    )
    lease_seconds: SECONDS = option("how long a session lives without a Verify", SESSIONS, default=60.0)
    connect_seconds: SECONDS = option("how long to wait for the TargetVerifier", APART, default=120.0)
    reconnect_seconds: SECONDS = option(
        "how long to retry a request while no server answers, or all are full", (*ASKING, "draft_worker"), default=60.0
    )
    queue: int = option(
        "requests that may wait for a slot of a server, or of a gateway's workers", (*SERVERS, "gateway"), default=256
    )
    prefill: ADDRESSES | None = option(
        "have long prompts computed by these servers of --role prefill, with the same bits (docs/prefill.md)",
        TARGETS,
        OURS,
    )
    prefill_min_tokens: int = option(
        "prompts with fewer tokens to process are processed in place", TARGETS, OURS, default=256
    )
    prefill_timeout_s: SECONDS = option(
        "how long the next part may take to arrive before the rest is processed in place", TARGETS, OURS, default=5.0
    )
    prefill_queue: int = option(
        "prompts that may wait for a slot; others are refused, and processed in place", ("prefill",), default=4
    )
    timeout: SECONDS | None = option("deadline of a request (default: none)", ASKING)

    workers: ADDRESSES | None = option(
        "engine ports of servers (default: start a server of its own)",
        ("gateway",),
        group="gateway of OpenAI clients (docs/openai.md)",
    )
    worker_flags: str = option(
        "flags of that server, in one argument (default: a fused_target on the embedded pair)", ("gateway",), default=""
    )
    http_port: int = option("port for HTTP; 0: any free port", ("gateway",), default=8080)
    gateway_flags: str = option("further flags of smg, in one argument", ("gateway",), default="")

    tls_cert: FILE | None = option(
        "the server's certificate (PEM, with its chain); turns TLS on",
        SERVING,
        group="security of a server (docs/security.md)",
    )
    tls_key: FILE | None = option("its private key", SERVING)
    tls_client_ca: FILE | None = option("require client certificates that one of these CAs signed", LISTENING)
    accept_tokens: FILE | None = option("require a token from this file of `identity token` lines", SERVING)
    insecure: bool = switch(
        "allow other machines without TLS: listen for them, or send them a token", (*SERVING, *ASKING)
    )
    max_message_bytes: int | None = option(
        "maximum size of a request (default: enough for the longest prompt, at most 4 MiB)", LISTENING
    )
    max_prompt_bytes: int | None = option(
        "maximum size of a text prompt (default: 64 per token of the sequence length)", SERVERS
    )
    max_sessions_per_identity: int | None = option("maximum open sessions of one caller (default: no limit)", SESSIONS)
    max_requests_per_identity: int | None = option(
        "maximum concurrent Generate calls of one caller (default: no limit)", LISTENING
    )
    prefix_sharing: str = option(
        "whose prompts and answers a prompt may begin with to be processed faster; identity: the caller's own, "
        "since how fast an answer is shows what was asked before",
        LISTENING,
        default="identity",
        metavar="identity|all|off",
    )
    prefix_cache_mb: int = option("memory for them in MiB, of target and draft together", LISTENING, default=64)
    log_prompts: bool = switch("log prompts and answers; otherwise they are never logged", SERVERS)

    tls_ca: FILE | None = option(
        "call with TLS; one of these CAs signed the server's certificate",
        CALLING,
        only=_CALLING,
        group="security of outgoing calls, from clients and from servers that call another server",
    )
    tls_client_cert: FILE | None = option(
        "the caller's own certificate, for a server with mTLS", CALLING, only=_CALLING
    )
    tls_client_key: FILE | None = option("its private key", CALLING, only=_CALLING)
    tls_server_name: NAME | None = option(
        "the name in the server's certificate, if it is not its host", CALLING, only=_CALLING
    )
    token_file: FILE | None = option("a file with the token to send with every call", CALLING, only=_CALLING)
    token_env: NAME | None = option(
        "the environment variable with that token, instead of a file", CALLING, only=_CALLING
    )

    prompt: tuple[str, ...] = option(
        "a prompt; may be repeated",
        PROMPTS,
        default=(),
        group="requests (on a server: the defaults for requests that leave them out)",
    )
    prompt_text: FILE | None = option("a file with one prompt per line", PROMPTS, also="prompt_file")
    chat: bool = switch("put each prompt into the model's chat template", PROMPTS)
    max_new_tokens: int | None = option(
        "maximum tokens to generate (default: a server's, else up to the sequence length)", GENERATING
    )
    temperature: float | None = option("0 is greedy (default: a server's, else 0)", GENERATING)
    top_k: int | None = option("keep the k most likely tokens; 0 keeps all (default: a server's, else 0)", GENERATING)
    top_p: float | None = option(
        "keep the likeliest tokens up to this total probability (default: a server's, else 1)", GENERATING
    )
    min_p: float | None = option(
        "drop tokens below this share of the likeliest (default: a server's, else 0)", GENERATING
    )
    seed: int | None = option("seed of the draws (default: a server's, else 0)", GENERATING)
    logit_bias: LIST | None = option(
        "add to the logits of single tokens, as in 50256:-100,11:2.5 (id:bias, -100 to 100)", PROMPTED
    )
    presence_penalty: float | None = option("lower the logit of generated tokens (-2 to 2; default 0)", PROMPTED)
    frequency_penalty: float | None = option(
        "lower it once for each time the token was generated (-2 to 2; default 0)", PROMPTED
    )
    repetition_penalty: float | None = option(
        "divide the logits of tokens of the prompt and output (0.01 to 2; default 1)", PROMPTED
    )
    json_schema: FILE | None = option("the output is JSON that this schema allows", PROMPTED)
    regex: str | None = option("the output matches this regular expression", PROMPTED, metavar="EXPRESSION")
    logprobs: int | None = option(
        "print every token's log-probability, and the N likeliest tokens in its place (0 to 20)", PROMPTED
    )
    adapter: NAME | None = option("the server's LoRA adapter to use, or one of --adapters (default: none)", PROMPTS)
    rule: str = option("how drafts are verified: agreement or rejection", ASKING, default="agreement")
    drafts: str = option(
        "what drafts: auto: the server's choice; none: plain decoding; or lookup, model or head alone, if it is there",
        PROMPTED,
        default="auto",
        metavar="auto|none|lookup|model|head",
    )
    stop: tuple[str, ...] = option("a string that ends the output; may be repeated", PROMPTED, default=())
    ignore_eos: bool = switch("go on past the end-of-sequence token", PROMPTED)
    service: str | None = option(
        "TargetVerifier, FusedSpeculativeServer or DraftWorker (default: whichever answers)", ("client",)
    )

    output: str | None = option(
        "accept: file to write the figures to, as JSON; convert: empty folder to write to",
        ("accept", "convert"),
        group="measuring and advice (roles accept and advise)",
    )
    report: str | None = option("the comparison.json, or prefill_apart.json, to use", ("advise",))
    rtt_ms: float | None = option("round trip between client and target (default: as measured)", ("advise",))
    link_mbps: float | None = option(
        "on prefill apart: bandwidth between target and PrefillWorker in Mbit/s (default: no limit)", ("advise",)
    )
    clients: int = option("concurrent clients of one target", ("advise",), default=1)

    convert: str | None = option(
        "rescale FP8 weights for Neuron; complete an EAGLE head (--draft_model) for its target "
        "(--target_model); or write safetensors",
        ("convert",),
        metavar="fp8|eagle|safetensors",
        group="converting checkpoints (role convert, docs/trainium-nxdi.md)",
    )
    shard_gb: float = option("most GB of a file", ("convert",), default=5.0)

    instance: str | None = option(
        "an instance type such as trn2.48xlarge, or FAMILY:CHIPS such as trn3:4",
        ("plan",),
        group="planning (roles plan and doctor; plan also takes the models' flags)",
    )
    lnc: int | None = option("physical cores per logical one (default: the chip's, 2 on Trn2 and Trn3)", ("plan",))
    core_count: int | None = option("cores for each placement (default: tp_degree, or as few as suffice)", ("plan",))
    context_buckets: LIST | None = option("nxdi: prompt lengths compiled, as in 1024,2048; or auto", ("plan",))
    decode_buckets: LIST | None = option("cache lengths compiled (default: sequence_length); or auto", ("plan",))
    quantization: str = option(
        "quantization of the target: none, int8, f8e4m3, f8e5m2, or auto (as config.json says)",
        ("plan",),
        default="auto",
    )
    modules_to_not_convert: LIST = option("modules to leave unquantized", ("plan",), default="lm_head")
    compile_minutes: float = option("minutes to assume for compiling a graph", ("plan",), default=10.0)
    json: bool = switch("print JSON", ("plan", "doctor"))

    metrics_port: int | None = option(
        "port for Prometheus metrics; 0: any free port (default: none)",
        SERVING,
        group="observability (docs/observability.md)",
    )
    metrics_host: HOST = option("address for metrics", SERVING, default="127.0.0.1")
    otlp_endpoint: URL | None = option(
        "http://HOST:PORT of the OTLP/gRPC collector to send traces to (default: none)", (*LISTENING, *PROMPTED)
    )
    log_format: str = option("text, or json: one object per line", EVERY, default="text", metavar="text|json")
    profile: bool = switch(
        "write performance_*.csv and .json: a row for each request, and on a target for each session",
        (*SERVERS, *PROMPTED),
    )
    debug: bool = switch("log more, and show tracebacks", EVERY)

    role: str
    argv: tuple[str, ...]
    given: frozenset[str]

    @property
    def length(self) -> int:
        """Tokens per sequence of the models that the role loads."""
        return self.sequence_length or 512

    @property
    def most_drafts(self) -> int:
        """The most draft tokens that a round may have. Raises ValueError."""
        k, most = auto_or_count("speculation_length", self.speculation_length), self.max_speculation_length
        if most is None:
            return 5 if k is None else k
        if k is not None and k > most:
            raise ValueError(f"speculation_length: {k} is above max_speculation_length {most}")
        return most

    def with_own_draft(self) -> Options:
        """A draft role's --model is its draft model. With n-gram lookup it is the target, whose tokenizer is used."""
        if self.draft_model or self.draft == "ngram" or self.role not in APART:
            return self
        return replace(self, draft_model=self.model)


FLAGS = flags_of(Options)
