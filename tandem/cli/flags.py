"""The flags of main.py: one table, a row each, with the roles and backends that take it."""

from __future__ import annotations

from tandem.cli.flag_row import ASKING, EVERY, PROMPTED, SERVERS, Group, flag, switch
from tandem.cli.model_flags import FIGURES, MODELS, PLANNING

DEFAULT_PORT = 50051

_NETWORK = Group(
    "network",
    (
        flag(
            "host",
            to=SERVERS,
            default="127.0.0.1",
            help="address a server listens on (default 127.0.0.1: this machine only)",
        ),
        flag(
            "port",
            to=(*SERVERS, *ASKING),
            type=int,
            default=DEFAULT_PORT,
            help="port a server listens on, or a client asks; 0: a free one",
        ),
        flag(
            "target_host",
            to=(*ASKING, "draft_worker"),
            default="127.0.0.1",
            help="where the server is, HOST or HOST:PORT; draft, draft_worker: several with commas, each may take over",
        ),
        flag(
            "target_port",
            to=("draft_worker",),
            type=int,
            default=DEFAULT_PORT,
            help="draft_worker: port of its TargetVerifier",
        ),
        switch("propose_only", to=("draft_worker",), help="draft_worker: know no target, draft for those that ask"),
        flag(
            "draft_host",
            to=("target",),
            metavar="HOST:PORT",
            help="target: speculate with the drafts of the DraftWorker there",
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
            to=("draft", "draft_worker"),
            default="auto",
            help="draft, draft_worker: send rounds ahead of verdicts, on or off; auto (default): where it is faster",
        ),
        flag(
            "health_port", to=SERVERS, type=int, help="servers: answer health checks here too, without TLS (for probes)"
        ),
        flag("ready_file", to=SERVERS, help="write address and process id here once ready"),
        flag(
            "drain_seconds",
            to=SERVERS,
            type=float,
            default=30.0,
            help="how long running requests may finish after SIGTERM",
        ),
        flag(
            "step_seconds",
            to=SERVERS,
            default="auto",
            help="servers: a step of the device that takes longer hangs; auto (default): by its own times; 0: no bound",
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
            help="how long a request tries to go on while no server answers, or all are full (default 60)",
        ),
        flag(
            "queue",
            to=SERVERS,
            type=int,
            default=256,
            help="requests that may wait for a slot of a server (default 256)",
        ),
        flag("timeout", to=ASKING, type=float, help="deadline of a request in seconds (default: none)"),
    ),
)

_TAKING = Group(
    "security of a server (docs/security.md)",
    (
        flag(
            "tls_cert", to=SERVERS, metavar="FILE", help="the server's certificate (PEM, with its chain); with it, TLS"
        ),
        flag("tls_key", to=SERVERS, metavar="FILE", help="its private key"),
        flag(
            "tls_client_ca", to=SERVERS, metavar="FILE", help="clients must show a certificate that one of these signed"
        ),
        flag(
            "accept_tokens",
            to=SERVERS,
            metavar="FILE",
            help="callers must show a token of this file: `identity token` lines",
        ),
        switch("insecure", to=(*SERVERS, *ASKING), help="without TLS: listen for, or send a token to, other machines"),
        flag(
            "max_message_bytes",
            to=SERVERS,
            type=int,
            help="of one request (default: what prompts can take, at most 4 MiB)",
        ),
        flag(
            "max_prompt_bytes",
            to=SERVERS,
            type=int,
            help="of a text prompt (default: 64 per token of the sequence length)",
        ),
        flag(
            "max_sessions_per_identity",
            to=("target", "draft_worker"),
            type=int,
            help="open sessions of one caller (default: no limit)",
        ),
        flag(
            "max_requests_per_identity",
            to=SERVERS,
            type=int,
            help="Generate calls of one caller at once (default: no limit)",
        ),
        switch("log_prompts", to=SERVERS, help="log what is asked and answered; nothing of it is otherwise"),
    ),
)

_CALLERS = (*ASKING, "target", "draft_worker")
_CALLING = Group(
    "security of calls: of clients, and of servers that ask another",
    (
        flag(
            "tls_ca",
            to=_CALLERS,
            metavar="FILE",
            help="call with TLS; the server's certificate is signed by one of these",
        ),
        flag(
            "tls_client_cert", to=_CALLERS, metavar="FILE", help="the caller's own certificate, for a server with mTLS"
        ),
        flag("tls_client_key", to=_CALLERS, metavar="FILE", help="its private key"),
        flag(
            "tls_server_name",
            to=_CALLERS,
            metavar="NAME",
            help="the name in the server's certificate, where not its host",
        ),
        flag("token_file", to=_CALLERS, metavar="FILE", help="a file with the token that accompanies every call"),
        flag("token_env", to=_CALLERS, metavar="NAME", help="or the environment variable that holds it"),
    ),
)

_GENERATING = (*PROMPTED, "accept", *SERVERS)
_REQUESTS = Group(
    "requests (on a server: what holds for requests that do not say)",
    (
        flag("prompt", to=(*PROMPTED, "accept"), action="append", help="a prompt; may be repeated"),
        flag("prompt_text", "prompt_file", to=(*PROMPTED, "accept"), help="a file with one prompt per line"),
        switch("chat", to=(*PROMPTED, "accept"), help="put each prompt into the model's chat template"),
        flag(
            "max_new_tokens",
            to=_GENERATING,
            type=int,
            help="most tokens to produce (default: a server's, else up to the sequence length)",
        ),
        flag("temperature", to=_GENERATING, type=float, help="0 is greedy (default: a server's, else 0)"),
        flag("top_k", to=_GENERATING, type=int, help="keep the k most likely tokens; 0 keeps all (default: likewise)"),
        flag(
            "top_p",
            to=_GENERATING,
            type=float,
            help="keep the likeliest tokens up to this probability (default: a server's, else 1)",
        ),
        flag(
            "min_p",
            to=_GENERATING,
            type=float,
            help="drop tokens below this share of the likeliest (default: a server's, else 0)",
        ),
        flag("seed", to=_GENERATING, type=int, help="seed of the draws (default: a server's, else 0)"),
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
    "seeing what goes on (docs/observability.md)",
    (
        flag(
            "metrics_port",
            to=SERVERS,
            type=int,
            help="servers: Prometheus metrics here; 0: a free port (default: none)",
        ),
        flag("metrics_host", to=SERVERS, default="127.0.0.1", help="servers: address of that port (default 127.0.0.1)"),
        flag(
            "otlp_endpoint",
            to=(*SERVERS, *PROMPTED),
            help="http://HOST:PORT of the OTLP/gRPC collector that traces go to (default: none)",
        ),
        flag("log_format", to=EVERY, default="text", help="text (default) or json, one object a line"),
        switch(
            "profile",
            to=(*SERVERS, *PROMPTED),
            help="write performance_*.csv and .json: a row for every request, on a target for every session too",
        ),
        switch("debug", to=EVERY, help="log more, and show tracebacks"),
    ),
)

GROUPS = (MODELS, _NETWORK, _TAKING, _CALLING, _REQUESTS, FIGURES, PLANNING, _SEEING)
FLAGS = {row.name: row for group in GROUPS for row in group.flags}
CALLING = tuple(row.name for row in _CALLING.flags)
