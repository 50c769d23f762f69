"""The configuration of a comparison. Every error is one line that names the flag."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tandem.cli.flags import FLAGS
from tandem.cli.option import COUNT, DIR, FLOATS, INTS, NAME, NAMES, RULES, SECONDS, built, flags_of, option
from tandem.cli.roles import BACKENDS, REAL, TORCH
from tandem.clients.openai_client import server_url
from tandem.comparison.links.link_settings import LINK_KINDS, TRACE, LinkSettings, traces_named
from tandem.comparison.measuring.architectures import (
    ASKED,
    AUTOREGRESSIVE,
    CONNECTABLE,
    DEFAULT,
    HEADED,
    NOT_COSTED,
    OPENAI,
    PIPELINED,
    SERVED_BY_VLLM,
    Condition,
    Load,
    plan,
)
from tandem.comparison.measuring.json_form import HIDDEN
from tandem.comparison.measuring.workloads import Prompt
from tandem.host.device_times import times_named
from tandem.rpc.credentials import Credentials
from tandem.speculation.types import GenerationRequest, Rule, SamplingParams
from tandem.workshops.planning.host_placement import CoreGroup, HostPlacement, one_length
from tandem.workshops.planning.shapes import holds_head

REQUESTS_PER_USER = 4  # least requests of a load per concurrent user
LEAST_FOR_CAPACITY = 8  # least requests for a percentile
CLIENTS = (1, 2, 4, 8, 16, 32, 64)  # default of a capacity
ONE_LENGTH = 3  # default speculation length of servers with a single one
MAX_CONCURRENCY, MAX_RATE = 1000, 1000.0
MIN_SLOTS = 4  # least KV slots under load; a server's own default
CONNECTING, STARTED = "architectures, and servers that run already", "servers that are started here"


def same(name: str, text: str | None = None, backends: tuple[str, ...] | None = None, **changed: Any) -> Any:
    """The roles' option of this name; help, backends and default are the role's unless given."""
    row = FLAGS[name]
    more = {"default": row.default, "metavar": row.options.get("metavar")} | changed
    return option(text or row.text, backends=backends or row.backends, **more)


@dataclass(frozen=True)
class ComparisonConfig:
    """A comparison, by the command's options. None: the servers' choice. The base has the first link and rule."""

    prompts: tuple[Prompt, ...]
    output_dir: Path
    connect: Mapping[str, str] = field(default_factory=dict)  # HOST:PORT or an OpenAI server's URL, by architecture
    credentials: Credentials = field(default_factory=Credentials, metadata=HIDDEN)  # sent to connected servers only
    placement: HostPlacement | None = None  # cores of this host that the architectures use in turn

    num_runs: int = option("times each prompt is run; sampled: with seed, seed + 1, ...", default=1, group="prompts")
    max_new_tokens: int = option("tokens to generate", default=64, group="requests")
    speculation_length: COUNT = option(
        f"draft tokens per round; auto (default): by measurement, {ONE_LENGTH} on Neuron", metavar="auto|K"
    )
    temperature: FLOATS = option("0 is greedy; the first of several is the base", default=(0.0,))
    rule: RULES = option("how drafts are verified: agreement, rejection or both", default=(Rule.AGREEMENT,))
    top_k: int = option("keep the k most likely tokens, 0 keeps all", default=0)
    top_p: float = option("nucleus, in (0, 1]", default=1.0)
    min_p: float = option("drop tokens below this fraction of the best", default=0.0)
    seed: int = option("seed of the draws", default=0)
    adapter: NAME = option("the adapter of all requests (default: none)", default="")
    timeout: SECONDS = option("deadline of one request", default=300.0)
    sequence_length: int = option("tokens per sequence, prompt included", default=512)

    rtt_ms: FLOATS = option(
        "emulated round trips, such as 0,20,50,100; the first is the base", default=(), group="links"
    )
    bandwidth_mbps: float | None = option("bandwidth of the emulated link in each direction (default: no limit)")
    up_mbps: float | None = option("bandwidth from the draft's side to the target's, if it is another one")
    jitter_ms: float = option("delay segments by up to so much more each way, at random", default=0.0)
    link: tuple[str, ...] = option(
        "a delay proxy on loopback (default), or a recorded link (docs/comparison.md), once for each of several",
        default=LINK_KINDS[:1],
        metavar="|".join(LINK_KINDS),
    )

    concurrency: INTS = option("also measure with so many users at once, such as 1,4,8", default=(), group="loads")
    rate: FLOATS = option("also measure Poisson arrivals of so many requests per second, such as 0.5,2", default=())
    # drafts apart then have a worker per client
    capacity: float | None = option("find the clients within MS a token at the 95th percentile", metavar="MS")
    max_num_completed_requests: int | None = option(
        "requests of each load (default: the prompts times --num-runs, and at least 4 for each user)"
    )
    mean_input_tokens: int | None = option("input length under load (default: prompts as they are)")
    stddev_input_tokens: int = option("its standard deviation", default=0)
    mean_output_tokens: int | None = option("output length under load (default: up to --max-new-tokens)")
    stddev_output_tokens: int = option("its standard deviation", default=0)

    architectures: NAMES = option(
        f"to compare; also {PIPELINED.name} and {HEADED.name}",
        default=tuple(each.name for each in DEFAULT),
        group=CONNECTING,
    )
    pipeline: str | None = same("pipeline", "of distributed (default: off) and remote_draft (auto)", default=None)

    model: str | None = option("target (default: the embedded one)", also="target_model", group=STARTED)
    draft_model: str | None = same("draft_model")
    draft: str = same("draft")
    adapters: str | None = same("adapters", "LoRA adapters of the target, of which --adapter takes one", BACKENDS)
    draft_adapters: str | None = same("draft_adapters", "those of the draft model, by the same names")
    head: DIR | None = option(f"the EAGLE-3 head of {HEADED.name}, beside the drafter of distributed")
    hand_out_features: str = same("hand_out_features", default="on")
    feature_context: int | None = same("feature_context", default=None)
    rehearse: NAME | None = same("rehearse")
    dtype: str = same("dtype")
    weights: str = same("weights")
    threads: int | None = option("CPU threads of each server (default: the server's choice)", (), TORCH)
    batch: int | None = option("KV slots of each server (default: the server's choice)")
    backend: str = same("backend")
    device: str = same("device")
    tp_degree: int = same("tp_degree")
    draft_device: str | None = option("cpu: a draft that is apart runs on the host's CPU", (), REAL, metavar="cpu")
    compiled_dir: DIR | None = same("compiled_dir")
    neuron_config: str | None = same("neuron_config")
    draft_neuron_config: str | None = same("draft_neuron_config")
    startup_timeout: SECONDS = option("how long a server may take to start", default=600.0)

    @property
    def sampling(self) -> SamplingParams:
        """The base's. Raises ValueError."""
        return built(SamplingParams, self, temperature=(self.temperature or (0.0,))[0])

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
    def calibrates(self) -> bool:
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
        for name, flag in flags_of(ComparisonConfig).items():
            words, chosen = flag.metavar or "", getattr(self, name)
            if words.islower() and chosen is not None:  # "auto|K" has other values
                _check_names(name.replace("_", "-"), (chosen,), words.split("|"))

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
            ("timeout", self.timeout, math.inf),
            ("startup-timeout", self.startup_timeout, math.inf),
            ("capacity", self.capacity, math.inf),
            *(("rate", rate, MAX_RATE) for rate in self.rate),
        ):
            if number is not None and not (math.isfinite(number) and 0 < number <= limit):
                most_of = "" if math.isinf(limit) else f" and at most {limit:g} requests per second"
                raise ValueError(f"{flag}: {number:g} is not a finite number above 0{most_of}")
        for flag in ("rtt_ms", "temperature", "rule", "concurrency", "rate"):
            if len(set(getattr(self, flag))) < len(getattr(self, flag)):
                raise ValueError(f"{flag.replace('_', '-')}: a value is named twice")

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
            ("rule", self.rule != (Rule.AGREEMENT,)),
            ("adapter", self.adapter),
            ("mean-input-tokens", self.mean_input_tokens is not None),
        ):
            yield self.over_http and given, f"{flag}: servers of vLLM are not compared so"

    def _wrong_links(self) -> Iterator[tuple[object, str]]:
        traced = [link.startswith(TRACE) for link in self.link]
        first = self.link[0] if self.link else ""
        yield not any(traced) and first not in LINK_KINDS, f"link: {first!r} is not one of {', '.join(LINK_KINDS)}"
        yield len(traced) > 1 and not all(traced), f"link: of several, each is {TRACE}UP,DOWN"
        yield len(set(self.link)) < len(self.link), "link: one is named twice"
        yield any(traced) and (self.bandwidth_mbps or self.up_mbps), "link: a recorded link has its own bandwidth"
        emulated = any(condition.link.rtt_ms is not None for condition in self.conditions)
        yield emulated and self.connect, "rtt-ms: only servers that are started here can be put behind an emulated link"

    def _wrong_loads(self) -> Iterator[tuple[object, str]]:
        room = f"a sequence length of {self.sequence_length}"
        full = f"max-new-tokens: {self.max_new_tokens} leaves no room for a prompt in {room}"
        yield self.max_new_tokens >= self.sequence_length, full
        capacity, requests = self.capacity is not None, self.max_num_completed_requests
        yield capacity and requests is not None, "max-num-completed-requests: --capacity has as many for each client"
        yield capacity and self.connect, "capacity: is for servers that are started here, and some are connected"
        yield capacity and self.placement, "capacity: clients with drafts of their own cannot be placed on chosen cores"
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
            yield stddev and mean is None, f"stddev-{which}-tokens: is for --mean-{which}-tokens, which is not given"
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
        return plan(request, self.links, self.temperature, self.rule)

    @property
    def links(self) -> tuple[LinkSettings, ...]:
        """The emulated links, or one that is not emulated. Raises ValueError."""
        recorded = [traces_named(link) for link in self.link if link.startswith(TRACE)]
        emulated = tuple(
            LinkSettings(rtt, self.bandwidth_mbps, self.up_mbps, self.jitter_ms, *traces)
            for traces in recorded or [("", "")]
            for rtt in self.rtt_ms or (0.0,)
        )
        return emulated if self.rtt_ms or emulated != (LinkSettings(0.0),) else (LinkSettings(),)

    @property
    def loads(self) -> tuple[Load, ...]:
        """The closed loops, then the open ones, all with the same number of requests (a capacity's: per user)."""
        least = max(len(self.prompts) * self.num_runs, REQUESTS_PER_USER * max(self.users, default=1))
        requests, of_capacity = self.max_num_completed_requests or least, self.capacity is not None
        closed = (
            Load(max(LEAST_FOR_CAPACITY, REQUESTS_PER_USER * users) if of_capacity else requests, concurrency=users)
            for users in self.users
        )
        return (*closed, *(Load(requests, rate=each) for each in self.rate))

    @property
    def users(self) -> tuple[int, ...]:
        """The numbers of concurrent users; ascending for a capacity."""
        return self.concurrency if self.capacity is None else tuple(sorted(self.concurrency or CLIENTS))

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
