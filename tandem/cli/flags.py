"""The table of the roles' flags, with the roles and backends that take each one."""

from __future__ import annotations

from tandem.cli.flag_row import ASKING, EVERY, GATEWAY, LISTENING, PREFILL, PROMPTED, SERVERS, Group, flag, switch
from tandem.cli.model_flags import CONVERTING, FIGURES, MODELS, PLANNING

DEFAULT_PORT = 50051

_NETWORK = Group(
    "network",
    (
        flag(
            "host",
            to=(*LISTENING, GATEWAY),
            default="127.0.0.1",
            help="address a server listens on (default: 127.0.0.1, this machine only)",
        ),
        flag(
            "port",
            to=(*LISTENING, *ASKING),
            type=int,
            default=DEFAULT_PORT,
            help="port a server listens on, or a client connects to; 0: any free port",
        ),
        flag(
            "target_host",
            to=(*ASKING, "draft_worker"),
            default="127.0.0.1",
            help="the server, HOST or HOST:PORT; draft, draft_worker: a comma-separated list, for failover",
        ),
        flag(
            "target_port",
            to=("draft_worker",),
            type=int,
            default=DEFAULT_PORT,
            help="draft_worker: port of its TargetVerifier",
        ),
        switch(
            "propose_only", to=("draft_worker",), help="draft_worker: have no target; only draft for targets that ask"
        ),
        flag(
            "draft_host",
            to=("target",),
            metavar="HOST:PORT",
            help="target: use drafts from the DraftWorker at this address",
        ),
        flag(
            "draft_seconds",
            to=("target",),
            type=float,
            default=5.0,
            help="target: how long a draft may take (default 5)",
        ),
        flag(
            "pipeline",
            to=("draft", "draft_worker", "target"),
            default="auto",
            metavar="off|on|never-waiting|auto",
            help="with a remote target or draft: off: each round waits for its verdict; on: rounds are sent before "
            "verdicts arrive; never-waiting: the target steps on by itself; auto (default): what is likely fastest",
        ),
        flag(
            "health_port",
            to=LISTENING,
            type=int,
            help="servers: also answer health checks on this port, without TLS (for probes)",
        ),
        flag(
            "engine_port",
            to=SERVERS,
            type=int,
            help="servers: port for the gateway of OpenAI clients (docs/openai.md); 0: any free port (default: none)",
        ),
        flag(
            "engine_host",
            to=SERVERS,
            default="127.0.0.1",
            help="servers: address for that port, which has neither TLS nor tokens (default 127.0.0.1)",
        ),
        flag("ready_file", to=(*LISTENING, GATEWAY), help="file to write the address and process id to once ready"),
        flag(
            "drain_seconds",
            to=(*LISTENING, GATEWAY),
            type=float,
            default=30.0,
            help="how long running requests may finish after SIGTERM",
        ),
        flag(
            "step_seconds",
            to=LISTENING,
            default="auto",
            help="servers: a longer device step counts as hung; auto (default): from measured times; 0: no limit",
        ),
        flag(
            "lease_seconds",
            to=("target", "draft_worker"),
            type=float,
            default=60.0,
            help="how long a session lives without a Verify",
        ),
        flag(
            "connect_seconds",
            to=("draft", "draft_worker"),
            type=float,
            default=120.0,
            help="how long to wait for the TargetVerifier",
        ),
        flag(
            "reconnect_seconds",
            to=(*ASKING, "draft_worker"),
            type=float,
            default=60.0,
            help="how long to retry a request while no server answers, or all are full (default 60)",
        ),
        flag(
            "queue",
            to=(*SERVERS, GATEWAY),
            type=int,
            default=256,
            help="requests that may wait for a slot of a server, or of a gateway's workers (default 256)",
        ),
        flag(
            "prefill",
            to=("target", "fused_target"),
            backends=("torch", "toy"),
            metavar="HOST:PORT[,...]",
            help="target, fused_target: have long prompts computed by these servers of --role prefill, with the same "
            "bits (docs/prefill.md)",
        ),
        flag(
            "prefill_min_tokens",
            to=("target", "fused_target"),
            backends=("torch", "toy"),
            type=int,
            default=256,
            help="prompts with fewer tokens to process are processed in place (default 256)",
        ),
        flag(
            "prefill_timeout_s",
            to=("target", "fused_target"),
            backends=("torch", "toy"),
            type=float,
            default=5.0,
            help="how long the next part may take to arrive before the rest is processed in place (default 5)",
        ),
        flag(
            "prefill_queue",
            to=(PREFILL,),
            type=int,
            default=4,
            help="prefill: prompts that may wait for a slot; others are refused, and processed in place (default 4)",
        ),
        flag("timeout", to=ASKING, type=float, help="deadline of a request in seconds (default: none)"),
    ),
)

_OPENAI = Group(
    "gateway of OpenAI clients (docs/openai.md)",
    (
        flag(
            "workers",
            to=(GATEWAY,),
            metavar="HOST:PORT[,...]",
            help="engine ports of servers (default: start a server of its own)",
        ),
        flag(
            "worker_flags",
            to=(GATEWAY,),
            default="--role fused_target",
            help="flags of that server, in one argument (default: a fused_target on the embedded pair)",
        ),
        flag("http_port", to=(GATEWAY,), type=int, default=8080, help="port for HTTP (default 8080); 0: any free port"),
        flag("gateway_flags", to=(GATEWAY,), default="", help="further flags of smg, in one argument"),
    ),
)

_TAKING = Group(
    "security of a server (docs/security.md)",
    (
        flag(
            "tls_cert",
            to=(*LISTENING, GATEWAY),
            metavar="FILE",
            help="the server's certificate (PEM, with its chain); turns TLS on",
        ),
        flag("tls_key", to=(*LISTENING, GATEWAY), metavar="FILE", help="its private key"),
        flag(
            "tls_client_ca",
            to=LISTENING,
            metavar="FILE",
            help="require client certificates that one of these CAs signed",
        ),
        flag(
            "accept_tokens",
            to=(*LISTENING, GATEWAY),
            metavar="FILE",
            help="require a token from this file of `identity token` lines",
        ),
        switch(
            "insecure",
            to=(*LISTENING, GATEWAY, *ASKING),
            help="allow other machines without TLS: listen for them, or send them a token",
        ),
        flag(
            "max_message_bytes",
            to=LISTENING,
            type=int,
            help="maximum size of a request (default: enough for the longest prompt, at most 4 MiB)",
        ),
        flag(
            "max_prompt_bytes",
            to=SERVERS,
            type=int,
            help="maximum size of a text prompt (default: 64 per token of the sequence length)",
        ),
        flag(
            "max_sessions_per_identity",
            to=("target", "draft_worker"),
            type=int,
            help="maximum open sessions of one caller (default: no limit)",
        ),
        flag(
            "max_requests_per_identity",
            to=LISTENING,
            type=int,
            help="maximum concurrent Generate calls of one caller (default: no limit)",
        ),
        flag(
            "prefix_sharing",
            to=LISTENING,
            default="identity",
            metavar="identity|all|off",
            help="whose prompts and answers a prompt may begin with to be processed faster (default: identity, the "
            "caller's own; how fast an answer is shows what was asked before)",
        ),
        flag(
            "prefix_cache_mb",
            to=LISTENING,
            type=int,
            default=64,
            help="memory for them in MiB, of target and draft together (default 64)",
        ),
        switch("log_prompts", to=SERVERS, help="log prompts and answers; otherwise they are never logged"),
    ),
)

_CALLERS = (*ASKING, *SERVERS)
_CALLERS_BY = {"nxdi": (*ASKING, "target", "draft_worker")}  # a fused_target calls PrefillWorkers alone
_CALLING = Group(
    "security of outgoing calls, from clients and from servers that call another server",
    (
        flag(
            "tls_ca",
            to=_CALLERS,
            only=_CALLERS_BY,
            metavar="FILE",
            help="call with TLS; one of these CAs signed the server's certificate",
        ),
        flag(
            "tls_client_cert",
            to=_CALLERS,
            only=_CALLERS_BY,
            metavar="FILE",
            help="the caller's own certificate, for a server with mTLS",
        ),
        flag("tls_client_key", to=_CALLERS, only=_CALLERS_BY, metavar="FILE", help="its private key"),
        flag(
            "tls_server_name",
            to=_CALLERS,
            only=_CALLERS_BY,
            metavar="NAME",
            help="the name in the server's certificate, if it is not its host",
        ),
        flag(
            "token_file",
            to=_CALLERS,
            only=_CALLERS_BY,
            metavar="FILE",
            help="a file with the token to send with every call",
        ),
        flag(
            "token_env",
            to=_CALLERS,
            only=_CALLERS_BY,
            metavar="NAME",
            help="the environment variable with that token, instead of a file",
        ),
    ),
)

_GENERATING = (*PROMPTED, "accept", *SERVERS)
_REQUESTS = Group(
    "requests (on a server: the defaults for requests that leave them out)",
    (
        flag("prompt", to=(*PROMPTED, "accept"), action="append", help="a prompt; may be repeated"),
        flag("prompt_text", "prompt_file", to=(*PROMPTED, "accept"), help="a file with one prompt per line"),
        switch("chat", to=(*PROMPTED, "accept"), help="put each prompt into the model's chat template"),
        flag(
            "max_new_tokens",
            to=_GENERATING,
            type=int,
            help="maximum tokens to generate (default: a server's, else up to the sequence length)",
        ),
        flag("temperature", to=_GENERATING, type=float, help="0 is greedy (default: a server's, else 0)"),
        flag(
            "top_k",
            to=_GENERATING,
            type=int,
            help="keep the k most likely tokens; 0 keeps all (default: a server's, else 0)",
        ),
        flag(
            "top_p",
            to=_GENERATING,
            type=float,
            help="keep the likeliest tokens up to this total probability (default: a server's, else 1)",
        ),
        flag(
            "min_p",
            to=_GENERATING,
            type=float,
            help="drop tokens below this share of the likeliest (default: a server's, else 0)",
        ),
        flag("seed", to=_GENERATING, type=int, help="seed of the draws (default: a server's, else 0)"),
        flag(
            "logit_bias",
            to=PROMPTED,
            metavar="LIST",
            help="add to the logits of single tokens, as in 50256:-100,11:2.5 (id:bias, -100 to 100)",
        ),
        flag(
            "presence_penalty", to=PROMPTED, type=float, help="lower the logit of generated tokens (-2 to 2; default 0)"
        ),
        flag(
            "frequency_penalty",
            to=PROMPTED,
            type=float,
            help="lower it once for each time the token was generated (-2 to 2; default 0)",
        ),
        flag(
            "repetition_penalty",
            to=PROMPTED,
            type=float,
            help="divide the logits of tokens of the prompt and output (above 0 to 2; default 1)",
        ),
        flag("json_schema", to=PROMPTED, metavar="FILE", help="the output is JSON that this schema allows"),
        flag("regex", to=PROMPTED, metavar="EXPRESSION", help="the output matches this regular expression"),
        flag(
            "logprobs",
            to=PROMPTED,
            type=int,
            metavar="N",
            help="print every token's log-probability, and the N likeliest tokens in its place (0 to 20)",
        ),
        flag(
            "adapter",
            to=(*PROMPTED, "accept"),
            metavar="NAME",
            help="the server's LoRA adapter to use, or one of --adapters (default: none)",
        ),
        flag("rule", to=ASKING, default="agreement", help="how drafts are verified: agreement (default) or rejection"),
        flag("stop", to=PROMPTED, action="append", default=(), help="a string that ends the output; may be repeated"),
        switch("ignore_eos", to=PROMPTED, help="go on past the end-of-sequence token"),
        flag(
            "service",
            to=("client",),
            help="client: TargetVerifier, FusedSpeculativeServer or DraftWorker (default: whichever answers)",
        ),
    ),
)

_SEEING = Group(
    "observability (docs/observability.md)",
    (
        flag(
            "metrics_port",
            to=(*LISTENING, GATEWAY),
            type=int,
            help="servers: port for Prometheus metrics; 0: any free port (default: none)",
        ),
        flag(
            "metrics_host",
            to=(*LISTENING, GATEWAY),
            default="127.0.0.1",
            help="address for metrics (default 127.0.0.1)",
        ),
        flag(
            "otlp_endpoint",
            to=(*LISTENING, *PROMPTED),
            help="http://HOST:PORT of the OTLP/gRPC collector to send traces to (default: none)",
        ),
        flag("log_format", to=EVERY, default="text", help="text (default), or json: one object per line"),
        switch(
            "profile",
            to=(*SERVERS, *PROMPTED),
            help="write performance_*.csv and .json: a row for each request, and on a target for each session",
        ),
        switch("debug", to=EVERY, help="log more, and show tracebacks"),
    ),
)

GROUPS = (MODELS, _NETWORK, _OPENAI, _TAKING, _CALLING, _REQUESTS, FIGURES, CONVERTING, PLANNING, _SEEING)
FLAGS = {row.name: row for group in GROUPS for row in group.flags}
CALLING = tuple(row.name for row in _CALLING.flags)
