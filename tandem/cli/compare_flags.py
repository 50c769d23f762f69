"""Defines the flags of `tandem compare`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, NoReturn

from tandem.comparison.links.settings import LINK_KINDS
from tandem.comparison.measuring.architectures import DEFAULT, HEADED, PIPELINED
from tandem.comparison.measuring.config import DEVICES, DRAFTERS, DTYPES, FEATURE_FORMATS, PIPELINES, WEIGHTS
from tandem.comparison.measuring.workloads import BUILT_IN
from tandem.planning.host_placement import BACKENDS

PROMPTS_PER_WORKLOAD = 4
"""Keeps the default comparison within a few minutes on two cores."""


class Parser(argparse.ArgumentParser):
    """Adds each flag in hyphen and underscore spelling, and reports an error in one line."""

    def flag(self, *names: str, **settings: Any) -> None:
        spellings = [spelling for name in names for spelling in (name, "--" + name[2:].replace("-", "_"))]
        self.add_argument(*dict.fromkeys(spellings), **settings)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def build_parser(program: str = "compare_architectures.py") -> Parser:
    """Builds the parser; `program` is the name that help and errors show."""
    parser = Parser(
        prog=program,
        description="Compare autoregressive, distributed, fused and remote-draft decoding on the same prompts.",
        epilog="Exit code: 0; 1 when a request or a file failed; 2 for a bad argument; 3 for a regression against"
        " --baseline; 4 when a server died; 130 by Ctrl-C, 143 by SIGTERM. What was measured by then is reported.",
        allow_abbrev=False,
    )
    _add_prompt_flags(parser)
    _add_generation_flags(parser)
    _add_link_flags(parser)
    _add_load_flags(parser)
    _add_connection_flags(parser)
    _add_model_flags(parser)
    _add_device_flags(parser)
    _add_server_flags(parser)
    parser.flag(
        "--format", default="html", metavar="LIST", help="format of the report: html, md or both (default: html)"
    )
    parser.flag("--render", type=Path, metavar="FILE", help="measure nothing; write the report of this comparison.json")
    parser.flag(
        "--from-records", type=Path, metavar="FILE", help="measure nothing; analyse and report this records.jsonl"
    )
    parser.flag(
        "--baseline", type=Path, metavar="FILE", help="a comparison.json to compare with; regressions are flagged"
    )
    parser.flag("--output-dir", type=Path, metavar="DIR", help="folder for the files (default: results/<timestamp>)")
    return parser


def _add_prompt_flags(parser: Parser) -> None:
    parser.flag("--prompt-file", type=Path, metavar="FILE", help="one prompt per non-empty line")
    parser.flag("--prompt", action="append", metavar="TEXT", help="a prompt; may be repeated")
    parser.flag("--chat", action="store_true", help="wrap your own prompts in the model's chat template")
    parser.flag("--workloads", metavar="KINDS", help=f"built-in prompts to use (default: {','.join(BUILT_IN)})")
    parser.flag(
        "--prompts-per-workload",
        type=int,
        metavar="N",
        help=f"built-in prompts of each kind (default: {PROMPTS_PER_WORKLOAD})",
    )
    parser.flag(
        "--num-runs",
        type=int,
        default=1,
        metavar="N",
        help="times each prompt is run; sampled: with seed, seed + 1, ... (default: 1)",
    )


def _add_generation_flags(parser: Parser) -> None:
    parser.flag("--max-new-tokens", type=int, default=64, metavar="N", help="tokens to generate (default: 64)")
    parser.flag(
        "--speculation-length",
        default="3",
        metavar="auto|K",
        help="draft tokens per round (default: 3); auto: the fastest length by measurement, without a prediction",
    )
    parser.flag("--temperature", default="0", metavar="LIST", help="0 is greedy; the first of several is the base")
    parser.flag(
        "--rule", default="agreement", metavar="LIST", help="how drafts are verified: agreement, rejection or both"
    )
    parser.flag("--top-k", type=int, default=0, help="keep the k most likely tokens, 0 keeps all (default: 0)")
    parser.flag("--top-p", type=float, default=1.0, help="nucleus, in (0, 1] (default: 1)")
    parser.flag("--min-p", type=float, default=0.0, help="drop tokens below this fraction of the best (default: 0)")
    parser.flag("--seed", type=int, default=0, help="seed of the draws (default: 0)")
    parser.flag(
        "--timeout", type=float, default=300.0, metavar="SECONDS", help="deadline of one request (default: 300)"
    )


def _add_link_flags(parser: Parser) -> None:
    parser.flag(
        "--rtt-ms", default="", metavar="LIST", help="emulated round trips, such as 0,20,50,100; the first is the base"
    )
    parser.flag(
        "--bandwidth-mbps",
        type=float,
        metavar="B",
        help="bandwidth of the emulated link in each direction (default: no limit)",
    )
    parser.flag(
        "--link",
        default="emulated",
        metavar="|".join(LINK_KINDS),
        help="a delay proxy on loopback, or the kernel's netem between network namespaces, which needs root",
    )


def _add_load_flags(parser: Parser) -> None:
    parser.flag(
        "--concurrency",
        default="",
        metavar="LIST",
        help="also measure with so many users at once, such as 1,4,8; each sends the next request when answered",
    )
    parser.flag(
        "--rate",
        default="",
        metavar="LIST",
        help="also measure Poisson arrivals of so many requests per second, such as 0.5,2; --seed is theirs too",
    )
    parser.flag(
        "--max-num-completed-requests",
        type=int,
        metavar="N",
        help="requests of each load (default: the prompts times --num-runs, and at least 4 for each user)",
    )
    for what, otherwise in (("input", "prompts as they are"), ("output", "up to --max-new-tokens")):
        parser.flag(
            f"--mean-{what}-tokens", type=int, metavar="N", help=f"{what} length under load (default: {otherwise})"
        )
        parser.flag(
            f"--stddev-{what}-tokens", type=int, default=0, metavar="N", help="its standard deviation (default: 0)"
        )


def _add_connection_flags(parser: Parser) -> None:
    parser.flag(
        "--architectures",
        default=",".join(a.name for a in DEFAULT),
        metavar="LIST",
        help=f"architectures to compare (default: %(default)s; {PIPELINED.name} and {HEADED.name} too)",
    )
    parser.flag(
        "--connect", action="append", default=[], metavar="ARCH=HOST:PORT", help="use a running server; may be repeated"
    )
    for name, metavar, text in (
        ("ca", "FILE", "connect with TLS; one of these CAs signed the servers' certificates"),
        ("client-cert", "FILE", "our certificate, for servers that require mTLS"),
        ("client-key", "FILE", "its private key"),
        ("server-name", "NAME", "the name in the servers' certificates, if it is not their host"),
    ):
        parser.flag(f"--tls-{name}", metavar=metavar, help=text)
    parser.flag("--token-file", metavar="FILE", help="a file with the token for the connected servers")
    parser.flag("--token-env", metavar="NAME", help="the environment variable with that token, instead of a file")
    parser.flag("--insecure", action="store_true", help="allow sending the token in clear text to other machines")


def _add_model_flags(parser: Parser) -> None:
    parser.flag("--model", "--target-model", dest="model", metavar="MODEL", help="target (default: the embedded one)")
    parser.flag("--draft-model", metavar="MODEL", help="draft model")
    parser.flag("--draft", default="auto", metavar="|".join(DRAFTERS), help="drafter (default: auto)")
    parser.flag("--adapters", metavar="NAME=DIR,...", help="LoRA adapters of the target, of which --adapter takes one")
    parser.flag("--draft-adapters", metavar="NAME=DIR,...", help="those of the draft model, by the same names")
    parser.flag("--adapter", metavar="NAME", help="the adapter of all requests (default: none)")
    parser.flag("--head", metavar="DIR", help=f"the EAGLE-3 head of {HEADED.name}, beside the drafter of distributed")
    parser.flag(
        "--hand-out-features",
        default="on",
        metavar="on|L1,L2,L3",
        help="layers whose hidden states the target sends to heads elsewhere (default: on, those usually read)",
    )
    parser.flag(
        "--feature-format",
        default="bfloat16",
        metavar="|".join(FEATURE_FORMATS),
        help="number format of these (default: bfloat16)",
    )
    parser.flag("--feature-context", type=int, metavar="N", help="of a prompt's last N positions (default: 256)")
    parser.flag("--dtype", default="auto", metavar="|".join(DTYPES), help="number format of the models (default: auto)")
    parser.flag(
        "--weights", default="auto", metavar="|".join(WEIGHTS), help="how weights lie in memory (default: auto)"
    )


def _add_device_flags(parser: Parser) -> None:
    parser.flag(
        "--backend",
        default="torch",
        metavar="|".join(BACKENDS),
        help="torch; nxdi: NxD Inference, on Neuron; toy: arithmetic instead of a model, for tests",
    )
    parser.flag("--device", default="auto", metavar="|".join(DEVICES), help="torch: where models run (default: auto)")
    parser.flag("--tp-degree", type=int, default=1, metavar="N", help="cores that share a target (default: 1)")
    parser.flag(
        "--cores",
        metavar="LIST",
        help="cores of this host that each architecture has, such as 0-15; they are then measured in turn"
        " (default: the system's choice; on Neuron as few as suffice, see --role plan)",
    )
    parser.flag(
        "--draft-cores",
        metavar="LIST",
        help="those of them that the draft has where it is apart (default: the last ones, as few as suffice)",
    )
    parser.flag(
        "--draft-device",
        metavar="cpu",
        help="where the draft runs that is apart: on the host's CPU (default: on the target's kind of device)",
    )
    parser.flag("--compiled-dir", metavar="DIR", help="folder of compiled graphs (default: the servers' own)")
    parser.flag("--neuron-config", metavar="JSON", help="nxdi: fields of NeuronConfig, as JSON or a file")
    parser.flag("--draft-neuron-config", metavar="JSON", help="nxdi, fused: the fields that differ for the draft")


def _add_server_flags(parser: Parser) -> None:
    parser.flag(
        "--pipeline",
        default="off",
        metavar="|".join(PIPELINES),
        help="how distributed and remote_draft wait for each other (default: off)",
    )
    parser.flag("--threads", type=int, metavar="T", help="CPU threads of each server (default: the server's choice)")
    parser.flag(
        "--sequence-length",
        type=int,
        default=512,
        metavar="N",
        help="tokens per sequence, prompt included (default: 512)",
    )
    parser.flag("--batch", type=int, metavar="SLOTS", help="KV slots of each server (default: the server's choice)")
    parser.flag(
        "--startup-timeout",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="how long a server may take to start (default: 600)",
    )
