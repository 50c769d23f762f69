"""The flags of main.py."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

DEFAULT_PORT = 50051
DRAFT_HELP = "hybrid (prompt lookup, else the draft model), model, or ngram (lookup alone); auto: hybrid if it can"


def parser_of(roles: Mapping[str, str]) -> argparse.ArgumentParser:
    """Of main.py; `roles` with what each is. Every flag in both spellings, --top_p and --top-p."""
    p = argparse.ArgumentParser(
        prog="main.py",
        description="Speculative decoding over gRPC: servers, clients, and single models.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="roles:\n" + "\n".join(f"  {name:14} {text}" for name, text in roles.items()),
    )
    p.add_argument("--role", required=True, choices=list(roles), metavar="ROLE", help="what to run, see below")
    _model_flags(p)
    _network_flags(p)
    _security_flags(p)
    _request_flags(p)
    _plan_flags(p)
    _seeing_flags(p)
    p.add_argument("--profile", action="store_true", help="write performance_*.csv and .json")
    p.add_argument("--debug", action="store_true", help="log more, and show tracebacks")
    return p


def _model_flags(p: argparse.ArgumentParser) -> None:
    models = p.add_argument_group("models (default: the embedded SmolLM2-135M-Instruct)")
    _flag(models, "model", help="model folder, .gguf file or hub id of the role's own model")
    _flag(models, "target_model", help="the target, where a role has two models")
    _flag(models, "draft_model", help="the draft model")
    _flag(models, "draft", default="auto", help=DRAFT_HELP)
    _flag(models, "backend", default="torch", help="torch, nxdi (NxD Inference, on Neuron), or toy (for tests)")
    _flag(models, "device", default="auto", help="auto, cpu, cuda or neuron (Trn2, Trn3)")
    _flag(models, "dtype", default="auto", help="auto, float32, bfloat16 or float16")
    _flag(models, "threads", type=int, help="CPU threads of a model (default: torch's choice)")
    _flag(
        models,
        "compile",
        default="auto",
        help="steps: native (C++), inductor or neuron (graphs), off (module code), auto",
    )
    bits = models.add_mutually_exclusive_group()
    bits.add_argument("--exact", action="store_true", help="use only step shapes that give the same bits (default)")
    bits.add_argument("--fast", action="store_true", help="use all step shapes, also where their last bits differ")
    _flag(models, "sequence_length", type=int, help="tokens per sequence, prompt included (servers: 512)")
    _flag(models, "batch", type=int, default=4, help="KV slots: sequences held at once (default 4)")
    _flag(
        models,
        "speculation_length",
        "gamma",
        metavar="auto|K",
        help="draft tokens per round; auto (default): as many as pay, by measurement. Clients: auto is the server's",
    )
    _flag(models, "max_speculation_length", type=int, help="a server's most (default: its speculation_length, auto: 5)")
    _flag(
        models,
        "tp_degree",
        type=int,
        default=1,
        help="cores that share a target (torch: one process each, by torchrun)",
    )
    _flag(models, "cores", help="cores of the device that this process uses, such as 0-3 (default: all)")
    _flag(models, "compiled_dir", help="folder of compiled models; may be shared (default: in ~/.cache/tandem)")
    _flag(models, "compile_for", help="compile: target, draft and fused, those that are wanted (default: all)")
    _flag(models, "batch_buckets", help="rows to compile steps for, such as 1,4 (default: what suits the device)")
    _flag(models, "draft_buckets", help="draft tokens to compile steps for, such as 2,5 (default: as batch_buckets)")
    _flag(models, "prefill_chunk", type=int, default=64, help="tokens of a prompt per step (default 64)")
    _flag(models, "neuron_config", metavar="JSON", help="nxdi: NeuronConfig's fields, as JSON or a file of it")
    _flag(models, "draft_neuron_config", metavar="JSON", help="nxdi, fused_target: fields that differ for the draft")
    _flag(models, "eagle", action="store_true", help="nxdi, fused_target: the draft is an EAGLE1 head of the target")


def _network_flags(p: argparse.ArgumentParser) -> None:
    network = p.add_argument_group("network")
    _flag(
        network, "host", default="127.0.0.1", help="address a server listens on (default 127.0.0.1: this machine only)"
    )
    _flag(
        network,
        "port",
        type=int,
        default=DEFAULT_PORT,
        help="port a server listens on, or a client asks; 0: a free one",
    )
    _flag(
        network,
        "target_host",
        default="127.0.0.1",
        help="where the server is, HOST or HOST:PORT; draft, draft_worker: several with commas, each may take over",
    )
    _flag(network, "target_port", type=int, default=DEFAULT_PORT, help="draft_worker: port of its TargetVerifier")
    _flag(network, "propose_only", action="store_true", help="draft_worker: know no target, draft for those that ask")
    _flag(network, "draft_host", metavar="HOST:PORT", help="target: speculate with the drafts of the DraftWorker there")
    _flag(network, "draft_seconds", type=float, default=5.0, help="target: how long a draft may take (default 5)")
    _flag(
        network,
        "pipeline",
        default="auto",
        help="draft, draft_worker: send rounds ahead of verdicts, on or off; auto (default): where it is faster",
    )
    _flag(network, "health_port", type=int, help="servers: answer health checks here too, without TLS (for probes)")
    _flag(network, "ready_file", help="write address and process id here once ready")
    _flag(network, "drain_seconds", type=float, default=30.0, help="how long running requests may finish after SIGTERM")
    _flag(
        network,
        "step_seconds",
        default="auto",
        help="servers: a step of the device that takes longer hangs; auto (default): by its own times; 0: no bound",
    )
    _flag(network, "lease_seconds", type=float, default=60.0, help="how long a session lives without a Verify")
    _flag(network, "connect_seconds", type=float, default=120.0, help="how long to wait for the TargetVerifier")
    _flag(
        network,
        "reconnect_seconds",
        type=float,
        default=60.0,
        help="how long a request tries to go on while no server answers, or all are full (default 60)",
    )
    _flag(network, "queue", type=int, default=256, help="requests that may wait for a slot of a server (default 256)")
    _flag(network, "timeout", type=float, help="deadline of a request in seconds (default: none)")


def _security_flags(p: argparse.ArgumentParser) -> None:
    taking = p.add_argument_group("security of a server (docs/security.md)")
    _flag(taking, "tls_cert", metavar="FILE", help="the server's certificate (PEM, with its chain); with it, TLS")
    _flag(taking, "tls_key", metavar="FILE", help="its private key")
    _flag(taking, "tls_client_ca", metavar="FILE", help="clients must show a certificate that one of these signed")
    _flag(
        taking, "accept_tokens", metavar="FILE", help="callers must show a token of this file: `identity token` lines"
    )
    _flag(taking, "insecure", action="store_true", help="without TLS: listen for, or send a token to, other machines")
    _flag(taking, "max_message_bytes", type=int, default=4 * 1024 * 1024, help="of one request (default 4 MiB)")
    _flag(taking, "max_prompt_bytes", type=int, help="of a text prompt (default: 64 per token of the sequence length)")
    _flag(taking, "max_sessions_per_identity", type=int, help="open sessions of one caller (default: no limit)")
    _flag(
        taking, "max_requests_per_identity", type=int, help="Generate calls of one caller at once (default: no limit)"
    )
    _flag(taking, "log_prompts", action="store_true", help="log what is asked and answered; nothing of it is otherwise")
    calling = p.add_argument_group("security of calls: of clients, and of servers that ask another")
    _flag(calling, "tls_ca", metavar="FILE", help="call with TLS; the server's certificate is signed by one of these")
    _flag(calling, "tls_client_cert", metavar="FILE", help="the caller's own certificate, for a server with mTLS")
    _flag(calling, "tls_client_key", metavar="FILE", help="its private key")
    _flag(calling, "tls_server_name", metavar="NAME", help="the name in the server's certificate, where not its host")
    _flag(calling, "token_file", metavar="FILE", help="a file with the token that accompanies every call")
    _flag(calling, "token_env", metavar="NAME", help="or the environment variable that holds it")


def _seeing_flags(p: argparse.ArgumentParser) -> None:
    seeing = p.add_argument_group("seeing what goes on (docs/observability.md)")
    _flag(seeing, "metrics_port", type=int, help="servers: Prometheus metrics here; 0: a free port (default: none)")
    _flag(seeing, "metrics_host", default="127.0.0.1", help="servers: address of that port (default 127.0.0.1)")
    _flag(seeing, "otlp_endpoint", help="http://HOST:PORT of the OTLP/gRPC collector that traces go to (default: none)")
    _flag(seeing, "log_format", default="text", help="text (default) or json, one object a line")


def _request_flags(p: argparse.ArgumentParser) -> None:
    asking = p.add_argument_group("requests (client roles)")
    _flag(asking, "prompt", action="append", help="a prompt; may be repeated")
    _flag(asking, "prompt_text", "prompt_file", help="a file with one prompt per line")
    _flag(asking, "chat", action="store_true", help="put each prompt into the model's chat template")
    _flag(asking, "max_new_tokens", type=int, help="most tokens to produce (default: up to the sequence length)")
    _flag(asking, "temperature", type=float, default=0.0, help="0 is greedy (default)")
    _flag(asking, "top_k", type=int, default=0, help="keep the k most likely tokens; 0 keeps all (default)")
    _flag(asking, "top_p", type=float, default=1.0, help="keep the likeliest tokens up to this probability (default 1)")
    _flag(asking, "min_p", type=float, default=0.0, help="drop tokens below this share of the likeliest (default 0)")
    _flag(asking, "seed", type=int, default=0, help="seed of the draws (default 0)")
    _flag(asking, "rule", default="agreement", help="how drafts are verified: agreement (default) or rejection")
    _flag(asking, "stop", action="append", default=[], help="a string that ends the output; may be repeated")
    _flag(asking, "output", help="accept: write the figures here as JSON")
    _flag(asking, "report", help="advise: the comparison.json whose measurements to use")
    _flag(asking, "rtt_ms", type=float, help="advise: round trip between client and target (default: as measured)")
    _flag(asking, "clients", type=int, default=1, help="advise: clients at once on one target (default 1)")
    _flag(asking, "ignore_eos", action="store_true", help="go on past the end-of-sequence token")
    _flag(
        asking,
        "service",
        help="client: TargetVerifier, FusedSpeculativeServer or DraftWorker (default: whichever answers)",
    )


def _plan_flags(p: argparse.ArgumentParser) -> None:
    plan = p.add_argument_group("planning (roles plan and doctor; plan also takes the models' flags)")
    _flag(plan, "instance", help="plan: trn2.48xlarge and the like, or FAMILY:CHIPS such as trn3:4")
    _flag(plan, "lnc", type=int, help="plan: physical cores per logical one (default: the chip's, 2 on Trn2 and Trn3)")
    _flag(plan, "core_count", type=int, help="plan: cores of either placement (default: tp_degree, or as few as do)")
    _flag(plan, "context_buckets", metavar="LIST", help="plan, nxdi: prompt lengths compiled, as in 1024,2048; or auto")
    _flag(
        plan, "decode_buckets", metavar="LIST", help="plan: cache lengths compiled (default: sequence_length); or auto"
    )
    _flag(
        plan, "quantization", default="auto", help="plan: of the target; none, int8, f8e4m3, f8e5m2; auto: config.json"
    )
    _flag(plan, "modules_to_not_convert", default="lm_head", metavar="LIST", help="plan: what it leaves out (lm_head)")
    _flag(plan, "json", action="store_true", help="plan, doctor: print JSON")


def _flag(group: argparse._ArgumentGroup, *names: str, **options: Any) -> None:
    spellings = dict.fromkeys(s for name in names for s in (f"--{name}", f"--{name.replace('_', '-')}"))
    group.add_argument(*spellings, dest=names[0], **options)
