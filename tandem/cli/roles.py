"""The roles of the command line: groups that take the same flags, and help texts."""

from __future__ import annotations

import time
from collections.abc import Coroutine
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tandem.cli.flags import Options

STARTED = time.monotonic()
BACKENDS = ("torch", "nxdi", "toy")
TORCH, NXDI, REAL, OURS = ("torch",), ("nxdi",), ("torch", "nxdi"), ("torch", "toy")

TARGETS = ("target", "fused_target")
SERVERS = (*TARGETS, "draft_worker")
APART = ("draft", "draft_worker")  # draft for a target elsewhere
SESSIONS = ("target", "draft_worker")
ASKING = ("client", "fused_client", "draft")  # send their own prompts to a server
CALLING = (*ASKING, *SERVERS, "settle")  # show their credentials to servers
ALONE = ("verify_target", "verify_draft")
PROMPTED = (*ASKING, *ALONE)
GENERATING = (*PROMPTED, *SERVERS, "settle")
DRAFTING = ("fused_target", "draft_worker", "draft", "compile")
VERIFYING = (*TARGETS, *ALONE, "check", "settle")
LISTENING = (*SERVERS, "prefill")
LOADING = (*LISTENING, "draft", *ALONE, "check", "compile", "settle")
SHAPED = (*LOADING, "plan")
FUSING = ("fused_target", "compile")
EVERY = (*LOADING, "client", "fused_client", "advise", "plan", "doctor", "convert")

COMPARE, SERVE = "compare", "serve"  # commands in a role's place
SERVE_FLAGS = ("--role", "fused_target", "--http_port", "8080", "--port", "0")  # of `serve`; other flags override them
COMMANDS = {
    SERVE: "serve [MODEL]: a fused_target for OpenAI clients, over HTTP at port 8080, or --http_port",
    COMPARE: "compares the architectures on the same prompts; see compare --help",
}

ROLES = {
    "target": "server: TargetVerifier, verifies drafts; decodes plainly, or with drafts from --draft_host",
    "fused_target": "server: FusedSpeculativeServer, draft and target side by side",
    "draft_worker": "server: DraftWorker, drafts and verifies at --target_host, or drafts for targets that ask it",
    "prefill": "server: PrefillWorker, computes long prompts for targets started with --prefill",
    "client": "asks any of the three servers",
    "fused_client": "asks a FusedSpeculativeServer",
    "draft": "drafts for its own prompts and verifies at --target_host",
    "verify_target": "runs the target alone, without a server, token by token",
    "verify_draft": "runs the draft alone, without a server, token by token",
    "check": "check RECEIPT --prompt FILE: checks what a server signed of an answer, with the model every token",
    "settle": "settle INPUT --engine openai=URL --output FILE: another engine answers, the target here makes it exact",
    "compile": "compiles the graphs of target, draft and both ahead of time, for servers to share",
    "convert": "converts a checkpoint for NxD Inference: FP8 range, EAGLE heads, safetensors",
    "advise": "prints the decision of a comparison.json for a round trip and a number of clients",
    "plan": "computes from config.json files what fits on a Trainium or Inferentia instance",
    "doctor": "reports what this machine has, where models can run on it, and what to do next",
}


def start(args: Options) -> Coroutine[Any, Any, Any]:
    """Makes a role's coroutine, which returns the exit code (None: 0). Imports its module only now."""
    module = "configuration" if args.role in LISTENING else "asking" if args.role in PROMPTED else "tools"
    function = "serve" if args.role in LISTENING else args.role
    return getattr(import_module(f"tandem.cli.{module}"), function)(args)
