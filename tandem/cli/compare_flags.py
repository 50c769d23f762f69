"""The options of `tandem compare`: ComparisonConfig's, and those that become one of its fields."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from tandem.cli.option import FILE, LIST, NAME, OptionParser, flags_of, option, switch
from tandem.cli.roles import REAL
from tandem.comparison.measuring.config import CONNECTING, STARTED, ComparisonConfig, same
from tandem.comparison.measuring.workloads import BUILT_IN, ON_REQUEST

PROMPTS_PER_WORKLOAD = 4  # keeps the default comparison within minutes on two cores


@dataclass(frozen=True)
class CompareOptions:
    prompt_file: Path | None = same("prompt_text", group="prompts")
    prompt: tuple[str, ...] = same("prompt")
    raw: bool = switch("give your own prompts as they are (default: in the model's chat template)")
    workloads: LIST | None = option(f"built-in prompts (default: {','.join(BUILT_IN)}; also {','.join(ON_REQUEST)})")
    prompts_per_workload: int | None = option(f"built-in prompts of each kind (default: {PROMPTS_PER_WORKLOAD})")

    tls_ca: FILE | None = same("tls_ca", group=CONNECTING)
    tls_client_cert: FILE | None = same("tls_client_cert")
    tls_client_key: FILE | None = same("tls_client_key")
    tls_server_name: NAME | None = same("tls_server_name")
    token_file: FILE | None = same("token_file")
    token_env: NAME | None = same("token_env")
    insecure: bool = switch("allow sending the token in clear text to other machines")
    connect: tuple[str, ...] = option(
        "a running server; openai=URL: any OpenAI server; ARCH=URL: one of vLLM (docs/vllm.md); may be repeated",
        default=(),
        metavar="ARCH=HOST:PORT",
    )

    cores: LIST | None = same(
        "cores", "cores of this host for each architecture in turn, such as 0-15 (docs/comparison.md)", group=STARTED
    )
    draft_cores: LIST | None = option("those of them for a draft that is apart (default: the last ones)", (), REAL)

    from_records: Path | None = option(
        "measure nothing; analyse and report this records.jsonl", metavar="FILE", group="output"
    )
    verbose: bool = option("show every request and all that is known of drafts", default=False, also="v")
    quiet: bool = switch("print the decision alone, and no progress")
    json: bool = switch("print comparison.json in place of tables")
    output_dir: Path | None = option("folder for the files (default: results/<timestamp>)", metavar="DIR")


GROUPS = ("prompts", "requests", "links", "loads", CONNECTING, STARTED, "output")
_DECLARED = [*flags_of(CompareOptions).items(), *flags_of(ComparisonConfig).items()]
COMPARE_FLAGS = dict(sorted(_DECLARED, key=lambda each: GROUPS.index(each[1].group)))


COMMON = (
    *("prompt_file", "prompt", "workloads", "architectures", "connect", "rtt_ms", "concurrency", "temperature"),
    *("max_new_tokens", "num_runs", "model", "draft_model", "device", "output_dir", "from_records"),
)


def build_parser(program: str = "compare_architectures.py") -> OptionParser[argparse.Namespace]:
    """`program`: the name in help and errors."""
    return OptionParser(
        argparse.Namespace,
        COMPARE_FLAGS,
        hyphens=True,
        said="error: ",
        common=COMMON,
        prog=program,
        usage=f"{program} [flags]",
        description="Compare autoregressive, distributed, fused and remote-draft decoding on the same prompts.",
        epilog="Exit code: 0; 1 when a request or a file failed; 2 for a bad argument; 4 when a server died; 130 by"
        " Ctrl-C, 143 by SIGTERM. What was measured by then is reported.",
    )
