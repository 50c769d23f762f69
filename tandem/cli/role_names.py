"""Groups of roles and backends for the rows of flags.py."""

from __future__ import annotations

SERVE = "serve"
"""`--role serve` stands for SERVE_FLAGS, which other flags override."""
SERVE_FLAGS = ("--role", "fused_target", "--http_port", "8080", "--port", "0")
BACKENDS = ("torch", "nxdi", "toy")
TORCH, NXDI, REAL, OURS = ("torch",), ("nxdi",), ("torch", "nxdi"), ("torch", "toy")

TARGETS = ("target", "fused_target")
SERVERS = (*TARGETS, "draft_worker")
APART = ("draft", "draft_worker")  # draft for a target elsewhere
SESSIONS = ("target", "draft_worker")
ASKING = ("client", "fused_client", "draft")  # send their own prompts to a server
CALLING = (*ASKING, *SERVERS)  # show their credentials to servers
ALONE = ("verify_target", "verify_draft")
PROMPTED = (*ASKING, *ALONE)
PROMPTS = (*PROMPTED, "accept")
GENERATING = (*PROMPTS, *SERVERS)
DRAFTING = ("fused_target", "draft_worker", "draft", "accept", "compile")
VERIFYING = (*TARGETS, *ALONE, "accept", "check")
LISTENING = (*SERVERS, "prefill")
LOADING = (*LISTENING, "draft", *ALONE, "accept", "check", "compile")
SHAPED = (*LOADING, "plan")
FUSING = ("fused_target", "compile")
EVERY = (*LOADING, "client", "fused_client", "advise", "plan", "doctor", "convert")
