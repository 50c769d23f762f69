"""The configuration of a comparison. Every error is one line that names the flag."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

from tandem.comparison.links.settings import LINK_KINDS, TRACE, LinkSettings, traces_named
from tandem.comparison.measuring.architectures import (
    ASKED,
    AUTOREGRESSIVE,
    CONNECTABLE,
    DEFAULT,
    HEADED,
    NOT_COSTED,
    OPENAI,
    SERVED_BY_VLLM,
)
from tandem.comparison.measuring.conditions import Condition, Load, plan
from tandem.comparison.measuring.json_form import HIDDEN
from tandem.comparison.measuring.workloads import Prompt
from tandem.host.device_times import times_named
from tandem.rpc.credentials import Credentials
from tandem.speculation.types import GenerationRequest, Rule, SamplingParams
from tandem.workshops.planning.host_placement import BACKENDS, CoreGroup, HostPlacement, one_length
from tandem.workshops.planning.shapes import holds_head

DTYPES: tuple[str, ...] = ("auto", "float32", "bfloat16", "float16")
DRAFTERS: tuple[str, ...] = ("auto", "hybrid", "ngram", "model", "eagle")
REQUESTS_PER_USER = 4  # least requests of a load per concurrent user
LEAST_FOR_CAPACITY = 8  # least requests for a percentile
CLIENTS = (1, 2, 4, 8, 16, 32, 64)  # default of a capacity
ONE_LENGTH = 3  # default speculation length of servers with a single one
LIST_FLAGS = {"rtts_ms": "rtt-ms", "temperatures": "temperature", "rules": "rule"}
MAX_CONCURRENCY, MAX_RATE = 1000, 1000.0
MIN_SLOTS = 4  # least KV slots under load; a server's own default


@dataclass(frozen=True)
class ComparisonConfig:
    """The configuration of a comparison, by flag. None: the servers' choice. The base has the first link and rule."""

    prompts: tuple[Prompt, ...]
    output_dir: Path
    architectures: tuple[str, ...] = tuple(a.name for a in DEFAULT)
    # architecture to HOST:PORT, or to the URL of an OpenAI server
    connect: Mapping[str, str] = field(default_factory=dict)
    credentials: Credentials = field(default_factory=Credentials, metadata=HIDDEN)  # sent to connected servers only
    num_runs: int = 1
    max_new_tokens: int = 64
    speculation_length: int | None = None
    sampling: SamplingParams = field(default_factory=SamplingParams)
    rtts_ms: tuple[float, ...] = ()
    bandwidth_mbps: float | None = None
    link: str = "emulated"  # emulated, or trace:UP,DOWN
    other_links: tuple[str, ...] = ()
    up_mbps: float | None = None
    jitter_ms: float = 0.0
    temperatures: tuple[float, ...] = ()
    rules: tuple[Rule, ...] = (Rule.AGREEMENT,)
    concurrency: tuple[int, ...] = ()
    rate: tuple[float, ...] = ()
    capacity_ms: float | None = None  # bound on the 95th percentile of TPOT; drafts apart then have a worker per client
    max_num_completed_requests: int | None = None
    mean_input_tokens: int | None = None
    stddev_input_tokens: int = 0
    mean_output_tokens: int | None = None
    stddev_output_tokens: int = 0
    sequence_length: int = 512
    batch: int | None = None
    threads: int | None = None
    backend: str = "torch"
    device: str = "auto"
    tp_degree: int = 1
    placement: HostPlacement | None = None  # cores of this host that the architectures use in turn
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
    feature_context: int | None = None
    pipeline: str = "off"  # for distributed's worker and, unless "on", remote_draft's target
    timeout_s: float = 300.0
    startup_timeout_s: float = 600.0

    @property
    def drafts_with_head(self) -> bool:
        return self.draft == "eagle" or (self.draft_model is not None and holds_head(self.draft_model))

    @property
    def one_length(self) -> bool:
        """Whether every round takes as long as the longest."""
        return one_length(self.backend, self.device)

    @property
    def groups(self) -> HostPlacement:
        """The cores of the servers; without a placement, only the degree of targets."""
        degree = CoreGroup("", self.tp_degree)
        return self.placement or HostPlacement(degree, degree, None)

    @property
    def over_http(self) -> bool:
        """Whether all architectures are vLLM servers, connected by URL."""
        return any("://" in address for name, address in self.connect.items() if name != OPENAI.name)

    @property
    def predicts(self) -> bool:
        """Whether costs are measured; vLLM reports no step times."""
        drafts = self.speculation_length != 0 and bool(set(self.architectures) - {*NOT_COSTED})
        return drafts and AUTOREGRESSIVE.name in self.architectures and not self.over_http

    def __post_init__(self) -> None:
        if self.speculation_length is None and self.one_length:
            object.__setattr__(self, "speculation_length", ONE_LENGTH)
        self._check_choices()
        self._check_numbers()
        for address in self.connect.values():
            self.credentials.check(server_url(address).netloc if "://" in address else address)
        for wrong, why in (*self._wrong_servers(), *self._wrong_links(), *self._wrong_loads()):
            if wrong:
                raise ValueError(why)
        for condition in self.conditions:
            condition.link.check()
        if self.rehearse is not None:
            times_named(self.rehearse)
        for folder in (self.output_dir, *self.output_dir.parents):
            if folder.is_file():
                raise ValueError(f"output-dir: {folder} is not a directory")

    def _check_choices(self) -> None:
        _check_names("architectures", self.architectures, ASKED)
        _check_names("connect", tuple(self.connect), {**CONNECTABLE, **ASKED}, may_be_empty=True)
        for flag, chosen, known in (
            ("backend", self.backend, BACKENDS),
            ("device", self.device, ("auto", "cpu", "cuda", "neuron")),
            ("draft-device", self.draft_device or "cpu", ("cpu",)),
            ("dtype", self.dtype, DTYPES),
            ("weights", self.weights, ("auto", "bfloat16", "float32", "int8", "q4", "as-stored")),
            ("draft", self.draft, DRAFTERS),
            ("pipeline", self.pipeline, ("off", "on", "never-waiting", "auto")),
        ):
            _check_names(flag, (chosen,), known)

    def _check_numbers(self) -> None:
        longest = self.sequence_length - 1
        for flag, value, least, most in (
            ("num-runs", self.num_runs, 1, None),
            ("max-new-tokens", self.max_new_tokens, 1, None),
            ("speculation-length", self.speculation_length, 0, None),
            ("sequence-length", self.sequence_length, 2, None),
            ("batch", self.batch, 1, None),
            ("threads", self.threads, 1, None),
            ("tp-degree", self.tp_degree, 1, None),
            ("feature-context", self.feature_context, 1, None),
            ("max-num-completed-requests", self.max_num_completed_requests, 1, None),
            *(("concurrency", users, 1, MAX_CONCURRENCY) for users in self.concurrency),
            ("mean-input-tokens", self.mean_input_tokens, 1, longest),
            ("mean-output-tokens", self.mean_output_tokens, 1, longest),
            ("stddev-input-tokens", self.stddev_input_tokens, 0, self.mean_input_tokens),
            ("stddev-output-tokens", self.stddev_output_tokens, 0, self.mean_output_tokens),
        ):
            if value is not None and most is not None and not least <= value <= most:
                raise ValueError(f"{flag}: {value} is not between {least} and {most}")
            if value is not None and value < least:
                raise ValueError(f"{flag}: {value} is below {least}")
        for flag, number, limit in (
            ("timeout", self.timeout_s, math.inf),
            ("startup-timeout", self.startup_timeout_s, math.inf),
            ("capacity", self.capacity_ms, math.inf),
            *(("rate", rate, MAX_RATE) for rate in self.rate),
        ):
            if number is not None and not (math.isfinite(number) and 0 < number <= limit):
                most_of = "" if math.isinf(limit) else f" and at most {limit:g} requests per second"
                raise ValueError(f"{flag}: {number:g} is not a finite number above 0{most_of}")
        for flag in ("rtts_ms", "temperatures", "rules", "concurrency", "rate"):
            if len(set(getattr(self, flag))) < len(getattr(self, flag)):
                raise ValueError(f"{LIST_FLAGS.get(flag, flag)}: a value is named twice")

    def _wrong_servers(self) -> Iterator[tuple[object, str]]:
        """Yields whether something is wrong with prompts or servers, and what."""
        here = set(self.architectures) - set(self.connect)
        secured = self.credentials != Credentials(insecure=self.credentials.insecure)
        yield not self.prompts, "prompt: no prompt is given"
        yield OPENAI.name in here, "architectures: openai is a server that runs: name it with --connect openai=URL"
        yield HEADED.name in here and not self.head, f"head: {HEADED.name} needs --head DIR, an EAGLE-3 head"
        yield self.adapters and not self.adapter, "adapters: name the one that requests have with --adapter"
        no_adapters = "adapter: give --adapters as well, for the servers that are started here"
        yield self.adapter and not self.adapters and here, no_adapters
        yield self.draft_adapters and not self.adapters, "draft-adapters: give --adapters as well"
        some_connected = "rehearse: is for servers that are started here, and some are connected"
        yield self.rehearse is not None and set(self.architectures) - here, some_connected
        unused = "connect: certificates and tokens are only for connected servers, and none is named"
        yield secured and not self.connect, unused
        for name in (*self.architectures, *self.connect) if self.over_http else ():
            served = name in SERVED_BY_VLLM or name == OPENAI.name
            yield not served, f"connect: vLLM has no {name}; URLs are for {', '.join(SERVED_BY_VLLM)}"
            url = f"connect: {name} needs a URL as the others have: {name}=http://HOST:PORT"
            yield "://" not in self.connect.get(name, ""), url
        for flag, given in (
            ("rule", self.rules != (Rule.AGREEMENT,)),
            ("adapter", self.adapter),
            ("mean-input-tokens", self.mean_input_tokens is not None),
        ):
            yield self.over_http and given, f"{flag}: servers of vLLM are not compared so"

    def _wrong_links(self) -> Iterator[tuple[object, str]]:
        links, traced = (self.link, *self.other_links), self.link.startswith(TRACE)
        temperatures = self.temperatures or (self.sampling.temperature,)
        yield temperatures[0] != self.sampling.temperature, "temperature: the first of the list is the base's"
        yield not traced and self.link not in LINK_KINDS, f"link: {self.link!r} is not one of {', '.join(LINK_KINDS)}"
        untraced = self.other_links and not all(link.startswith(TRACE) for link in links)
        yield untraced, f"link: of several, each is {TRACE}UP,DOWN"
        yield len(set(links)) < len(links), "link: one is named twice"
        yield traced and (self.bandwidth_mbps or self.up_mbps), "link: a recorded link has its own bandwidth"
        emulated = any(condition.link.rtt_ms is not None for condition in self.conditions)
        yield emulated and self.connect, "rtt-ms: only servers that are started here can be put behind an emulated link"

    def _wrong_loads(self) -> Iterator[tuple[object, str]]:
        room = f"a sequence length of {self.sequence_length}"
        full = f"max-new-tokens: {self.max_new_tokens} leaves no room for a prompt in {room}"
        yield self.max_new_tokens >= self.sequence_length, full
        capacity, requests = self.capacity_ms is not None, self.max_num_completed_requests
        counted = "max-num-completed-requests: --capacity has as many for each client"
        yield capacity and requests is not None, counted
        connected = "capacity: is for servers that are started here, and some are connected"
        yield capacity and self.connect, connected
        placed = "capacity: clients with drafts of their own cannot be placed on chosen cores"
        yield capacity and self.placement, placed
        for flag, value in (
            ("max-num-completed-requests", requests),
            ("mean-input-tokens", self.mean_input_tokens),
            ("mean-output-tokens", self.mean_output_tokens),
        ):
            alone = value is not None and not (self.users or self.rate)
            yield alone, f"{flag}: is for --concurrency and --rate, and neither is given"
        for which, mean, stddev in (
            ("input", self.mean_input_tokens, self.stddev_input_tokens),
            ("output", self.mean_output_tokens, self.stddev_output_tokens),
        ):
            no_mean = f"stddev-{which}-tokens: is for --mean-{which}-tokens, which is not given"
            yield stddev and mean is None, no_mean
        inputs, outputs = self.mean_input_tokens or 1, self.mean_output_tokens or self.max_new_tokens
        long = f"mean-input-tokens: {inputs} and {outputs} new tokens exceed {room}"
        yield inputs + outputs > self.sequence_length, long

    @property
    def conditions(self) -> tuple[Condition, ...]:
        """The conditions without a load, the base first."""
        request = GenerationRequest(
            text="",
            sampling=self.sampling,
            max_new_tokens=self.max_new_tokens,
            speculation_length=self.speculation_length,
            adapter=self.adapter,
        )
        return plan(request, self.links, self.temperatures, self.rules)

    @property
    def links(self) -> tuple[LinkSettings, ...]:
        """The emulated links, or one that is not emulated. Raises ValueError."""
        recorded = [traces_named(link) for link in (self.link, *self.other_links) if link.startswith(TRACE)]
        emulated = tuple(
            LinkSettings(rtt, self.bandwidth_mbps, self.up_mbps, self.jitter_ms, *traces)
            for traces in recorded or [("", "")]
            for rtt in self.rtts_ms or (0.0,)
        )
        return emulated if self.rtts_ms or emulated != (LinkSettings(0.0),) else (LinkSettings(),)

    @property
    def loads(self) -> tuple[Load, ...]:
        """The closed loops, then the open ones, all with the same number of requests (a capacity's: per user)."""
        least = max(len(self.prompts) * self.num_runs, REQUESTS_PER_USER * max(self.users, default=1))
        requests, of_capacity = self.max_num_completed_requests or least, self.capacity_ms is not None
        closed = (
            Load(max(LEAST_FOR_CAPACITY, REQUESTS_PER_USER * users) if of_capacity else requests, concurrency=users)
            for users in self.users
        )
        return (*closed, *(Load(requests, rate=each) for each in self.rate))

    @property
    def users(self) -> tuple[int, ...]:
        """The numbers of concurrent users; ascending for a capacity."""
        return self.concurrency if self.capacity_ms is None else tuple(sorted(self.concurrency or CLIENTS))

    @property
    def load_conditions(self) -> tuple[Condition, ...]:
        """The base under each load."""
        return tuple(self.conditions[0].under(load) for load in self.loads)

    @property
    def slots(self) -> int | None:
        """KV slots of a server, one per concurrent request; None: the server's choice."""
        if self.batch is not None or not self.users:
            return self.batch
        return max(MIN_SLOTS, *self.users)


def _check_names(flag: str, names: tuple[str, ...], known: Collection[str], may_be_empty: bool = False) -> None:
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
    """Parses ARCH=HOST:PORT or ARCH=URL, one per architecture. Raises ValueError."""
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
