"""Defines and validates the configuration of a comparison. Every error is one line that names the flag."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlsplit

from tandem.comparison.links.impairments import TRACE, Impairments, traces_named
from tandem.comparison.links.settings import LINK_KINDS
from tandem.comparison.measuring.architectures import ASKED, CONNECTABLE, DEFAULT, HEADED, OPENAI
from tandem.comparison.measuring.conditions import Condition, plan
from tandem.comparison.measuring.json_form import HIDDEN, encoded
from tandem.comparison.measuring.loads import Load, check_length, check_loads
from tandem.comparison.measuring.others_workloads import read_arrivals
from tandem.comparison.measuring.workloads import Prompt
from tandem.comparison.vllm import settings as vllm
from tandem.host.published_times import times_named
from tandem.rpc.credentials import Credentials
from tandem.speculation.types import GenerationRequest, Rule, SamplingParams
from tandem.workshops.planning.head_shape import holds_head
from tandem.workshops.planning.host_placement import BACKENDS, HostPlacement, one_length

DTYPES: tuple[str, ...] = ("auto", "float32", "bfloat16", "float16")
DRAFTERS: tuple[str, ...] = ("auto", "hybrid", "ngram", "model", "eagle")
REQUESTS_PER_USER = 4
"""The least number of requests of a load, for each concurrent user."""
LEAST_FOR_CAPACITY = 8
"""The least number of requests from which a capacity's percentile is taken."""
CLIENTS = (1, 2, 4, 8, 16, 32, 64)
"""The numbers of clients at which a capacity is measured, unless others are named."""
ONE_LENGTH = 3
"""The speculation length of servers that take one, if none is named: there is nothing for auto to choose."""
MIN_SLOTS = 4
"""The least number of KV slots of a server that is measured under load; a server's own default."""


@dataclass(frozen=True)
class ComparisonConfig:
    """The configuration of a comparison. None leaves the choice to the servers.

    The base condition uses `sampling`, the first of `rtts_ms` and the first of `rules`; see
    tandem/comparison/measuring/conditions.py. Without `rtts_ms`, `bandwidth_mbps` and what
    tandem/comparison/links/impairments.py has, no link is emulated; `link` may be trace:UP,DOWN, with others like it in
    `other_links`, each of which is measured.
    `speculation_length` None (auto) chooses lengths adaptively; servers that take one length have ONE_LENGTH then.
    `connect` maps architectures to the HOST:PORT of running servers, or to the URL of those of others, and
    `credentials` are sent to those only. `pipeline` applies to the draft worker of the distributed architecture and,
    unless it is "on", to the target of remote_draft. `head` is the EAGLE-3 head of distributed_head,
    which gets features in `feature_format`, of the last `feature_context` positions of a prompt, from a target with
    `hand_out_features` (as the flag of that name).

    `concurrency` and `rate` (requests per second; `arrivals`: a file with their pattern) are the loads, see
    tandem/comparison/measuring/loads.py; each answers `max_num_completed_requests` under the base condition.
    With `capacity_ms`, a bound on the 95th percentile of the time per token, they say how many clients a target serves:
    every client of an architecture that drafts apart has a draft worker of its own, and there are as many requests for
    each client. `mean_input_tokens` cuts the prompts of loads to
    a length, `mean_output_tokens` sets the length of their outputs.

    With the `engine` vllm, the targets are OpenAI servers of the vLLM that `vllm_python` has (see
    tandem/comparison/vllm), started with `vllm_args` as well.

    `tp_degree` cores or processes share each target. With a `placement`, every architecture has the same cores of this
    host, and they are measured in turn, because a device's core belongs to one process. `draft_device` "cpu" puts the
    draft on the host's CPU where it is apart, whatever the target runs on. `neuron_config` and
    `draft_neuron_config` (JSON or a file) and `compiled_dir` are passed on to servers, and so is `rehearse`, the
    name of the device whose step times they take.
    """

    prompts: tuple[Prompt, ...]
    output_dir: Path
    architectures: tuple[str, ...] = tuple(a.name for a in DEFAULT)
    connect: Mapping[str, str] = field(default_factory=dict)
    credentials: Credentials = field(default_factory=Credentials, metadata=HIDDEN)
    num_runs: int = 1
    max_new_tokens: int = 64
    speculation_length: int | None = None
    sampling: SamplingParams = field(default_factory=SamplingParams)
    rtts_ms: tuple[float, ...] = ()
    bandwidth_mbps: float | None = None
    link: str = "emulated"
    other_links: tuple[str, ...] = ()
    up_mbps: float | None = None
    up_share: float = 0.5
    jitter_ms: float = 0.0
    loss: float = 0.0
    temperatures: tuple[float, ...] = ()
    rules: tuple[Rule, ...] = (Rule.AGREEMENT,)
    concurrency: tuple[int, ...] = ()
    rate: tuple[float, ...] = ()
    capacity_ms: float | None = None
    arrivals: str | None = None
    max_num_completed_requests: int | None = None
    mean_input_tokens: int | None = None
    stddev_input_tokens: int = 0
    mean_output_tokens: int | None = None
    stddev_output_tokens: int = 0
    sequence_length: int = 512
    batch: int | None = None
    threads: int | None = None
    engine: str = "tandem"
    vllm_python: str | None = None
    vllm_args: str = ""
    backend: str = "torch"
    device: str = "auto"
    tp_degree: int = 1
    placement: HostPlacement | None = None
    draft_device: str | None = None
    neuron_config: str | None = None
    draft_neuron_config: str | None = None
    compiled_dir: str | None = None
    dtype: str = "auto"
    weights: str = "auto"
    model: str | None = None
    draft_model: str | None = None
    draft: str = "auto"
    adapters: str | None = None
    draft_adapters: str | None = None
    adapter: str = ""
    head: str | None = None
    rehearse: str | None = None
    hand_out_features: str = "on"
    feature_format: str = "bfloat16"
    feature_context: int | None = None
    pipeline: str = "off"
    timeout_s: float = 300.0
    startup_timeout_s: float = 600.0

    @property
    def drafts_with_head(self) -> bool:
        """Whether the drafter is an EAGLE-3 head, which reads its target's features."""
        return self.draft == "eagle" or (self.draft_model is not None and holds_head(self.draft_model))

    @property
    def one_length(self) -> bool:
        """Whether a server's rounds all take as long as its longest."""
        return one_length(self.backend, self.device)

    def __post_init__(self) -> None:
        if self.speculation_length is None and (self.one_length or self.engine == vllm.VLLM):
            object.__setattr__(self, "speculation_length", ONE_LENGTH)
        _check_names("architectures", self.architectures, ASKED)
        _check_names("connect", tuple(self.connect), {**CONNECTABLE, **ASKED}, may_be_empty=True)
        if OPENAI.name in self.architectures and OPENAI.name not in self.connect:
            raise ValueError("architectures: openai is a server that runs: name it with --connect openai=URL")
        for flag, value, least in (
            ("num-runs", self.num_runs, 1),
            ("max-new-tokens", self.max_new_tokens, 1),
            ("speculation-length", self.speculation_length, 0),
            ("sequence-length", self.sequence_length, 2),
            ("batch", self.batch, 1),
            ("threads", self.threads, 1),
            ("tp-degree", self.tp_degree, 1),
            ("feature-context", self.feature_context, 1),
        ):
            if value is not None and value < least:
                raise ValueError(f"{flag}: {value} is below {least}")
        if HEADED.name in self.architectures and not (self.head or HEADED.name in self.connect):
            raise ValueError(f"head: {HEADED.name} needs --head DIR, the folder of an EAGLE-3 head")
        for flag, seconds in (("timeout", self.timeout_s), ("startup-timeout", self.startup_timeout_s)):
            if not (math.isfinite(seconds) and seconds > 0):
                raise ValueError(f"{flag}: {seconds} is not a finite number of seconds above 0")
        if self.max_new_tokens >= self.sequence_length:
            raise ValueError(
                f"max-new-tokens: {self.max_new_tokens} leaves no room for a prompt"
                f" in a sequence length of {self.sequence_length}"
            )
        for flag, chosen, known in (
            ("backend", (self.backend,), BACKENDS),
            ("device", (self.device,), ("auto", "cpu", "cuda", "neuron")),
            ("draft-device", (self.draft_device or "cpu",), ("cpu",)),
            ("dtype", (self.dtype,), DTYPES),
            ("weights", (self.weights,), ("auto", "bfloat16", "float32", "int8", "q4", "as-stored")),
            ("draft", (self.draft,), DRAFTERS),
            ("feature-format", (self.feature_format,), ("bfloat16", "int8")),
            ("pipeline", (self.pipeline,), ("off", "on", "never-waiting", "auto")),
            ("engine", (self.engine,), vllm.ENGINES),
        ):
            _check_names(flag, chosen, dict.fromkeys(known))
        self._check_conditions()
        self._check_loads()
        self._check_adapters()
        if self.engine == vllm.VLLM:
            vllm.check(self)
        elif self.vllm_python or self.vllm_args:
            raise ValueError("vllm-python: is for --engine vllm, as --vllm-args is")
        if self.rehearse is not None:
            times_named(self.rehearse)
            if set(self.architectures) & set(self.connect):
                raise ValueError("rehearse: is for servers that are started here, and some are connected")
        if self.credentials != Credentials(insecure=self.credentials.insecure) and not self.connect:
            raise ValueError("connect: certificates and tokens are only for connected servers, and none is named")
        for name, address in self.connect.items():
            over_http = "://" in address
            if over_http and name != OPENAI.name and self.engine != vllm.VLLM:
                raise ValueError(f"connect: {name}={address} has a URL, as servers of --engine vllm have")
            self.credentials.check(server_url(address).netloc if over_http else address)
        if not self.prompts:
            raise ValueError("prompt: no prompt is given")
        for folder in (self.output_dir, *self.output_dir.parents):
            if folder.is_file():
                raise ValueError(f"output-dir: {folder} is not a directory")

    def _check_conditions(self) -> None:
        for flag, values in (("rtt-ms", self.rtts_ms), ("temperature", self.temperatures), ("rule", self.rules)):
            if len(set(values)) < len(values):
                raise ValueError(f"{flag}: a value is named twice")
        if self.temperatures and self.temperatures[0] != self.sampling.temperature:
            raise ValueError("temperature: the first of the list is the base's")
        if self.link not in LINK_KINDS and not self.link.startswith(TRACE):
            raise ValueError(f"link: {self.link!r} is not one of {', '.join(LINK_KINDS)}")
        recorded = (self.link, *self.other_links)
        if self.other_links and not all(link.startswith(TRACE) for link in recorded):
            raise ValueError(f"link: of several, each is {TRACE}UP,DOWN")
        if len(set(recorded)) < len(recorded):
            raise ValueError("link: one is named twice")
        if self.link.startswith(TRACE) and (self.bandwidth_mbps or self.up_mbps):
            raise ValueError("link: a recorded link has its own bandwidth")
        for condition in self.conditions:
            condition.link.check()
            if condition.link.rtt_ms is not None and self.connect:
                raise ValueError("rtt-ms: only servers that are started here can be put behind an emulated link")

    def _check_adapters(self) -> None:
        """Servers refuse what they cannot be started with; an adapter that no request has would pass."""
        if self.adapters and not self.adapter:
            raise ValueError("adapters: name the one that requests have with --adapter")
        if self.adapter and not self.adapters and set(self.architectures) - set(self.connect):
            raise ValueError("adapter: give --adapters as well, for the servers that are started here")
        if self.draft_adapters and not self.adapters:
            raise ValueError("draft-adapters: give --adapters as well")

    def _check_loads(self) -> None:
        check_loads(self.concurrency, self.rate, self.max_num_completed_requests)
        if self.capacity_ms is not None and not (math.isfinite(self.capacity_ms) and self.capacity_ms > 0):
            raise ValueError(f"capacity: {self.capacity_ms:g} is not a finite number above 0")
        if self.capacity_ms is not None and self.max_num_completed_requests is not None:
            raise ValueError("max-num-completed-requests: --capacity has as many for each client")
        if self.capacity_ms is not None and self.connect:
            raise ValueError("capacity: is for servers that are started here, and some are connected")
        if self.capacity_ms is not None and self.placement:
            raise ValueError("capacity: clients with drafts of their own cannot be placed on chosen cores")
        if self.arrivals is not None:
            read_arrivals(Path(self.arrivals))
            if not self.rate:
                raise ValueError("arrivals: give the --rate that they are stretched to")
        shaped = {
            "max-num-completed-requests": self.max_num_completed_requests,
            "mean-input-tokens": self.mean_input_tokens,
            "mean-output-tokens": self.mean_output_tokens,
        }
        for flag, value in shaped.items():
            if value is not None and not (self.users or self.rate):
                raise ValueError(f"{flag}: is for --concurrency and --rate, and neither is given")
        check_length("input", self.mean_input_tokens, self.stddev_input_tokens, self.sequence_length - 1)
        check_length("output", self.mean_output_tokens, self.stddev_output_tokens, self.sequence_length - 1)
        longest_input, longest_output = self.mean_input_tokens or 1, self.mean_output_tokens or self.max_new_tokens
        if longest_input + longest_output > self.sequence_length:
            raise ValueError(
                f"mean-input-tokens: {longest_input} and {longest_output} new tokens"
                f" exceed a sequence length of {self.sequence_length}"
            )

    @property
    def conditions(self) -> tuple[Condition, ...]:
        """The conditions under which requests are sent one at a time, the base first."""
        request = GenerationRequest(
            text="",
            sampling=self.sampling,
            max_new_tokens=self.max_new_tokens,
            speculation_length=self.speculation_length,
            adapter=self.adapter,
        )
        return plan(request, self.rtts_ms, self.bandwidth_mbps, self.temperatures, self.rules, self.impairments)

    @property
    def impairments(self) -> tuple[Impairments, ...]:
        """In what the emulated links are not constant and symmetric, each of them. Raises ValueError."""
        recorded = [link for link in (self.link, *self.other_links) if link.startswith(TRACE)]
        each = [traces_named(link) for link in recorded] or [("", "")]
        return tuple(Impairments(self.up_share, self.up_mbps, self.jitter_ms, self.loss, *traces) for traces in each)

    @property
    def loads(self) -> tuple[Load, ...]:
        """The closed loops, then the open ones, each in the order given.

        All have the same number of requests; of a capacity's loops, as many for each user.
        """
        least = max(len(self.prompts) * self.num_runs, REQUESTS_PER_USER * max(self.users, default=1))
        requests, of_capacity = self.max_num_completed_requests or least, self.capacity_ms is not None
        closed = (
            Load(max(LEAST_FOR_CAPACITY, REQUESTS_PER_USER * users) if of_capacity else requests, concurrency=users)
            for users in self.users
        )
        return (*closed, *(Load(requests, rate=each, pattern=self.arrivals or "") for each in self.rate))

    @property
    def users(self) -> tuple[int, ...]:
        """The numbers of users at once; for a capacity in ascending order, and some in any case."""
        return self.concurrency if self.capacity_ms is None else tuple(sorted(self.concurrency or CLIENTS))

    @property
    def load_conditions(self) -> tuple[Condition, ...]:
        """The base condition under each load."""
        return tuple(self.conditions[0].under(load) for load in self.loads)

    @property
    def slots(self) -> int | None:
        """KV slots of a server: as many as requests are under way at once; None: the server's choice."""
        if self.batch is not None or not self.users:
            return self.batch
        return max(MIN_SLOTS, *self.users)


def settings_as_json(config: ComparisonConfig) -> dict[str, Any]:
    """Returns the configuration as JSON, without credentials."""
    return encoded(config)


def _check_names(flag: str, names: tuple[str, ...], known: Mapping[str, object], may_be_empty: bool = False) -> None:
    if not names and not may_be_empty:
        raise ValueError(f"{flag}: name at least one of {', '.join(known)}")
    for name in names:
        if name not in known:
            raise ValueError(f"{flag}: {name!r} is not one of {', '.join(known)}")
        if names.count(name) > 1:
            raise ValueError(f"{flag}: {name!r} is named twice")


def server_url(value: str) -> SplitResult:
    """Parses http://host[:port][/v1]. Raises ValueError."""
    url = urlsplit(value.rstrip("/").removesuffix("/v1"))
    if url.scheme not in ("http", "https") or not url.hostname or url.path or url.query:
        raise ValueError(f"connect: {value!r} is not http://HOST:PORT, as an OpenAI server has it")
    _ = url.port  # raises ValueError
    return url


def parse_connect(values: Sequence[str]) -> dict[str, str]:
    """Parses ARCH=HOST:PORT or, of OpenAI servers, ARCH=URL; one per architecture. Raises ValueError."""
    addresses: dict[str, str] = {}
    for value in values:
        name, _, address = value.partition("=")
        if name == OPENAI.name or "://" in address:
            server_url(address)
            host, port = address, "1"
        else:
            host, _, port = address.rpartition(":")
        if not (name and host and port.isdecimal() and 0 < int(port) < 65536):
            raise ValueError(f"connect: {value!r} is not ARCH=HOST:PORT")
        if name in addresses:
            raise ValueError(f"connect: {name!r} is named twice")
        addresses[name] = address
    return addresses
