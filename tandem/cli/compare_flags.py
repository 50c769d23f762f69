"""The options of `tandem compare`. An option without a default has that of ComparisonConfig's field."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.cli.flags import FLAGS
from tandem.cli.option import DIR, FILE, LIST, NAME, SECONDS, OptionParser, flags_of, option, switch
from tandem.cli.roles import BACKENDS, REAL, TORCH
from tandem.comparison.links.settings import LINK_KINDS
from tandem.comparison.measuring.architectures import HEADED, PIPELINED
from tandem.comparison.measuring.config import ONE_LENGTH, ComparisonConfig
from tandem.comparison.measuring.workloads import BUILT_IN, ON_REQUEST
from tandem.speculation.types import Rule

PROMPTS_PER_WORKLOAD = 4  # keeps the default comparison within minutes on two cores
STARTED = "servers that are started here"


def same(name: str, text: str | None = None, backends: tuple[str, ...] | None = None, group: str = "") -> Any:
    """The roles' option of this name; help and backends are the role's unless given."""
    row = FLAGS[name]
    shown = row.options.get("metavar")
    return option(text or row.text, backends=backends or row.backends, metavar=shown, group=group)


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class CompareOptions:
    """`given`: names of the options on the command line."""

    prompt_file: Path | None = same("prompt_text", group="prompts")
    prompt: tuple[str, ...] = same("prompt")
    raw: bool = switch("give your own prompts as they are (default: in the model's chat template)")
    workloads: LIST | None = option(f"built-in prompts (default: {','.join(BUILT_IN)}; also {','.join(ON_REQUEST)})")
    prompts_per_workload: int | None = option(f"built-in prompts of each kind (default: {PROMPTS_PER_WORKLOAD})")
    num_runs: int = option("times each prompt is run; sampled: with seed, seed + 1, ...")

    max_new_tokens: int = option("tokens to generate", group="requests")
    speculation_length: str = option(
        f"draft tokens per round; auto: by measurement, {ONE_LENGTH} on Neuron", default="auto", metavar="auto|K"
    )
    temperature: LIST = option("0 is greedy; the first of several is the base", default="0")
    rule: LIST = option("how drafts are verified: agreement, rejection or both", default=Rule.AGREEMENT.value)
    top_k: int = option("keep the k most likely tokens, 0 keeps all", default=0)
    top_p: float = option("nucleus, in (0, 1]", default=1.0)
    min_p: float = option("drop tokens below this fraction of the best", default=0.0)
    seed: int = option("seed of the draws", default=0)
    adapter: NAME | None = option("the adapter of all requests (default: none)")
    timeout: SECONDS = option("deadline of one request", default=ComparisonConfig.timeout_s)
    sequence_length: int = option("tokens per sequence, prompt included")

    rtt_ms: LIST | None = option("emulated round trips, such as 0,20,50,100; the first is the base", group="links")
    bandwidth_mbps: float | None = option("bandwidth of the emulated link in each direction (default: no limit)")
    up_mbps: float | None = option("bandwidth from the draft's side to the target's, if it is another one")
    jitter_ms: float = option("delay segments by up to so much more each way, at random")
    link: tuple[str, ...] = option(
        "a delay proxy on loopback (default), or a recorded link (docs/comparison.md), once for each of several",
        default=(ComparisonConfig.link,),
        metavar="|".join(LINK_KINDS),
    )

    concurrency: LIST = option("also measure with so many users at once, such as 1,4,8", group="loads")
    rate: LIST = option("also measure Poisson arrivals of so many requests per second, such as 0.5,2")
    capacity: float | None = option("find the clients within MS a token at the 95th percentile", metavar="MS")
    max_num_completed_requests: int | None = option(
        "requests of each load (default: the prompts times --num-runs, and at least 4 for each user)"
    )
    mean_input_tokens: int | None = option("input length under load (default: prompts as they are)")
    stddev_input_tokens: int = option("its standard deviation")
    mean_output_tokens: int | None = option("output length under load (default: up to --max-new-tokens)")
    stddev_output_tokens: int = option("its standard deviation")

    tls_ca: FILE | None = same("tls_ca", group="architectures, and servers that run already")
    tls_client_cert: FILE | None = same("tls_client_cert")
    tls_client_key: FILE | None = same("tls_client_key")
    tls_server_name: NAME | None = same("tls_server_name")
    token_file: FILE | None = same("token_file")
    token_env: NAME | None = same("token_env")
    architectures: LIST = option(
        f"to compare; also {PIPELINED.name} and {HEADED.name}", default=",".join(ComparisonConfig.architectures)
    )
    connect: tuple[str, ...] = option(
        "a running server; openai=URL: any OpenAI server; ARCH=URL: one of vLLM (docs/vllm.md); may be repeated",
        default=(),
        metavar="ARCH=HOST:PORT",
    )
    insecure: bool = switch("allow sending the token in clear text to other machines")
    pipeline: str = same("pipeline")

    model: str | None = option("target (default: the embedded one)", also="target_model", group=STARTED)
    draft_model: str | None = same("draft_model")
    draft: str = same("draft")
    adapters: str | None = same("adapters", "LoRA adapters of the target, of which --adapter takes one", BACKENDS)
    draft_adapters: str | None = same("draft_adapters", "those of the draft model, by the same names")
    head: DIR | None = option(f"the EAGLE-3 head of {HEADED.name}, beside the drafter of distributed")
    hand_out_features: str = same("hand_out_features")
    feature_context: int | None = same("feature_context")
    rehearse: NAME | None = same("rehearse")
    dtype: str = same("dtype")
    weights: str = same("weights")
    threads: int | None = option("CPU threads of each server (default: the server's choice)", (), TORCH)
    batch: int | None = option("KV slots of each server (default: the server's choice)")
    backend: str = same("backend")
    device: str = same("device")
    tp_degree: int = same("tp_degree")
    cores: LIST | None = same(
        "cores", "cores of this host for each architecture in turn, such as 0-15 (docs/comparison.md)"
    )
    draft_cores: LIST | None = option("those of them for a draft that is apart (default: the last ones)", (), REAL)
    draft_device: str | None = option("cpu: a draft that is apart runs on the host's CPU", (), REAL, metavar="cpu")
    compiled_dir: DIR | None = same("compiled_dir")
    neuron_config: str | None = same("neuron_config")
    draft_neuron_config: str | None = same("draft_neuron_config")
    startup_timeout: SECONDS = option("how long a server may take to start", default=ComparisonConfig.startup_timeout_s)

    from_records: Path | None = option(
        "measure nothing; analyse and report this records.jsonl", metavar="FILE", group="output"
    )
    verbose: bool = option("show every request and all that is known of drafts", default=False, also="v")
    quiet: bool = switch("print the decision alone, and no progress")
    json: bool = switch("print comparison.json in place of tables")
    output_dir: Path | None = option("folder for the files (default: results/<timestamp>)", metavar="DIR")

    argv: tuple[str, ...]
    given: frozenset[str]


COMPARE_FLAGS = flags_of(CompareOptions, ComparisonConfig)


def build_parser(program: str = "compare_architectures.py") -> OptionParser[CompareOptions]:
    """`program`: the name in help and errors."""
    return OptionParser(
        CompareOptions,
        COMPARE_FLAGS,
        hyphens=True,
        said="error: ",
        prog=program,
        description="Compare autoregressive, distributed, fused and remote-draft decoding on the same prompts.",
        epilog="Exit code: 0; 1 when a request or a file failed; 2 for a bad argument; 4 when a server died; 130 by"
        " Ctrl-C, 143 by SIGTERM. What was measured by then is reported.",
    )
