"""Deploys a server role on Ray Serve, as autoscaled replicas behind Serve's gRPC proxy.

    python -m tandem.workshops.ray_serve.application --neuron_cores 32 -- --role target --model DIR --batch 8

The flags after `--` are main.py's. Run it once for each role; all roles share one cluster and one port. Needs the extra
`ray`, and this repository importable on every node.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tandem.cli import main as launcher
from tandem.cli.configuration import role_config
from tandem.installing import install_command
from tandem.workshops.ray_serve.ingress import servicer_functions
from tandem.workshops.ray_serve.replica import REPLICAS

# Hashing the session's id keeps its calls on one replica. There is no fallback if it is busy, since no other replica
# has the session: a full replica answers RESOURCE_EXHAUSTED, and clients wait.
_ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
_ROUTER_OPTIONS = {"num_fallback_replicas": 0}
_CALLS_PER_SLOT = 16  # high enough that the slots run out first


@dataclass(frozen=True, slots=True)
class RayConfig:
    """The configuration of one application. Ray reserves `neuron_cores` and `cpus` for each replica.

    `busy_slots`: replicas are added while the calls in progress per replica exceed this share of its KV slots.
    """

    neuron_cores: int = 0
    cpus: float = 1.0
    min_replicas: int = 1
    max_replicas: int = 1
    busy_slots: float = 0.75

    def __post_init__(self) -> None:
        if self.neuron_cores < 0:
            raise ValueError(f"neuron_cores: {self.neuron_cores} is below 0")
        if self.cpus < 0:
            raise ValueError(f"cpus: {self.cpus} is below 0")
        if not 1 <= self.min_replicas <= self.max_replicas:
            raise ValueError(f"min_replicas: {self.min_replicas} is outside 1 to max_replicas {self.max_replicas}")
        if not 0 < self.busy_slots <= 1:
            raise ValueError(f"busy_slots: {self.busy_slots} is outside (0, 1]")


def start(port: int, http_port: int = 8000, everywhere: bool = True, insecure: bool = False) -> None:
    """Starts Serve's proxies, on every node or only the head, unless they run. Tandem uses the gRPC `port`.

    It has no TLS: unless `insecure`, a proxy answers callers on its own host alone.
    """
    from ray import serve
    from ray.serve.config import gRPCOptions

    location = "EveryNode" if everywhere else "HeadOnly"
    options = gRPCOptions(port=port, grpc_servicer_functions=servicer_functions(insecure))
    serve.start(proxy_location=location, http_options={"host": "127.0.0.1", "port": http_port}, grpc_options=options)


def application(config: RayConfig, flags: Sequence[str]) -> Any:
    """Checks main.py's flags and builds the application of a role, without deploying it. Raises ValueError."""
    args = launcher.parser().parse_args(flags)
    if args.role not in REPLICAS:
        raise ValueError(f"role: {args.role} is not one of {', '.join(REPLICAS)}")
    slots = role_config(args, args.model).models.shape.slots
    from ray import serve
    from ray.serve.config import AutoscalingConfig, RequestRouterConfig

    replica = REPLICAS[args.role]
    deployment = serve.deployment(
        name=replica.__name__,
        ray_actor_options={"num_cpus": config.cpus, "resources": _resources(config)},
        max_ongoing_requests=slots * _CALLS_PER_SLOT,
        autoscaling_config=AutoscalingConfig(
            min_replicas=config.min_replicas,
            max_replicas=config.max_replicas,
            target_ongoing_requests=slots * config.busy_slots,
        ),
        request_router_config=RequestRouterConfig(request_router_class=_ROUTER, request_router_kwargs=_ROUTER_OPTIONS),
        graceful_shutdown_timeout_s=args.drain_seconds + 5,
        health_check_period_s=1,  # a dead replica is replaced, and its sessions move, within seconds
    )(replica)
    return deployment.bind(tuple(flags))


def _resources(config: RayConfig) -> dict[str, float]:
    """Returns Ray's resource request. Ray assigns NeuronCores to replicas with NEURON_RT_VISIBLE_CORES."""
    return {"neuron_cores": config.neuron_cores} if config.neuron_cores else {}


def run(config: RayConfig, flags: Sequence[str]) -> None:
    """Deploys a role and waits until a replica is ready. Raises ValueError."""
    made = application(config, flags)
    from ray import serve

    name = REPLICAS[launcher.parser().parse_args(flags).role].__name__
    serve.run(made, name=name, route_prefix=f"/{name}")


def build_parser() -> argparse.ArgumentParser:
    """Builds the parser of the flags before `--`."""
    p = argparse.ArgumentParser(
        prog="tandem.workshops.ray_serve.application", description="Deploy a server role on Ray Serve."
    )
    p.add_argument("--address", default="auto", help="the Ray cluster (default: that of this machine)")
    p.add_argument("--grpc_port", type=int, default=9000, help="Serve's gRPC port (default 9000)")
    p.add_argument("--neuron_cores", type=int, default=0, help="NeuronCores for each replica; logical cores on Trn2")
    p.add_argument("--cpus", type=float, default=1.0, help="CPUs for each replica (default 1)")
    p.add_argument("--min_replicas", type=int, default=1, help="minimum number of replicas (default 1)")
    p.add_argument("--max_replicas", type=int, default=1, help="maximum number of replicas (default 1)")
    p.add_argument("--busy_slots", type=float, default=0.75, help="share of busy KV slots that adds replicas")
    p.add_argument(
        "--insecure", action="store_true", help="answer other hosts too, in clear text (first application of a cluster)"
    )
    p.add_argument("flags", nargs="+", metavar="-- --role ROLE ...", help="main.py's flags")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Deploys a role. Returns 0, or 2 if it cannot start, with the reason in one line on stderr."""
    parser = build_parser()
    args = parser.parse_args(argv)
    try:
        config = RayConfig(args.neuron_cores, args.cpus, args.min_replicas, args.max_replicas, args.busy_slots)
        try:
            import ray
        except ImportError:
            raise ValueError(f"ray is not installed: {install_command('ray')}") from None
        ray.init(address=args.address)
        start(args.grpc_port, insecure=args.insecure)
        run(config, args.flags)
    except (ValueError, ConnectionError) as error:
        print(f"{parser.prog}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
