"""Ray Serve: a server role as an application of autoscaled replicas behind Serve's gRPC proxy.

    python -m tandem.ray_serve.application --neuron_cores 32 --max_replicas 4 -- --role target --model DIR --batch 8

What follows `--` is main.py's. Run once for each role; all share one cluster and one port. Needs the extra `ray`, and
this repository importable on every node.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tandem.cli import main as launcher
from tandem.cli.configuration import role_config
from tandem.ray_serve.ingress import SERVICER_FUNCTIONS
from tandem.ray_serve.replica import REPLICAS

# Calls of one session stay on one replica, by hashing its id. Falling back to another one when the first is busy would
# only find that the session is not there: a full replica says so itself, and clients wait (RESOURCE_EXHAUSTED).
_ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
_ROUTER_OPTIONS = {"num_fallback_replicas": 0}
_CALLS_PER_SLOT = 16  # a bound that is never reached before slots run out


@dataclass(frozen=True, slots=True)
class RayConfig:
    """One application. `neuron_cores` and `cpus` are what Ray reserves for each replica.

    `busy_slots`: replicas are added while calls under way per replica exceed this share of its KV slots.
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


def start(port: int, http_port: int = 8000, everywhere: bool = True) -> None:
    """Serve's proxies, on every node or the head alone, if they are not there yet. Tandem uses `port`, gRPC's."""
    from ray import serve
    from ray.serve.config import gRPCOptions

    location = "EveryNode" if everywhere else "HeadOnly"
    options = gRPCOptions(port=port, grpc_servicer_functions=list(SERVICER_FUNCTIONS))
    serve.start(proxy_location=location, http_options={"host": "127.0.0.1", "port": http_port}, grpc_options=options)


def application(config: RayConfig, flags: Sequence[str]) -> Any:
    """A role as an application, unsent; main.py's flags are checked. Raises ValueError."""
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
        health_check_period_s=1,  # a replica that died is replaced, and its sessions go elsewhere, within seconds
    )(replica)
    return deployment.bind(tuple(flags))


def _resources(config: RayConfig) -> dict[str, float]:
    """Ray knows NeuronCores by this name, and tells each replica which are its own (NEURON_RT_VISIBLE_CORES)."""
    return {"neuron_cores": config.neuron_cores} if config.neuron_cores else {}


def run(config: RayConfig, flags: Sequence[str]) -> None:
    """Deploys a role and waits until a replica is ready. Raises ValueError."""
    made = application(config, flags)
    from ray import serve

    name = REPLICAS[launcher.parser().parse_args(flags).role].__name__
    serve.run(made, name=name, route_prefix=f"/{name}")


def build_parser() -> argparse.ArgumentParser:
    """The flags before `--`."""
    p = argparse.ArgumentParser(prog="tandem.ray_serve.application", description="A server role on Ray Serve.")
    p.add_argument("--address", default="auto", help="the Ray cluster (default: the one this machine is in)")
    p.add_argument("--grpc_port", type=int, default=9000, help="Serve's gRPC port (default 9000)")
    p.add_argument("--neuron_cores", type=int, default=0, help="NeuronCores of a replica; logical ones on Trn2")
    p.add_argument("--cpus", type=float, default=1.0, help="CPUs of a replica (default 1)")
    p.add_argument("--min_replicas", type=int, default=1, help="replicas that always run (default 1)")
    p.add_argument("--max_replicas", type=int, default=1, help="replicas under load (default 1)")
    p.add_argument("--busy_slots", type=float, default=0.75, help="share of KV slots in use that adds replicas")
    p.add_argument("flags", nargs="+", metavar="-- --role ROLE ...", help="main.py's flags")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes: 0 deployed, 2 cannot start (one line on stderr says why)."""
    parser = build_parser()
    args = parser.parse_args(argv)
    try:
        config = RayConfig(args.neuron_cores, args.cpus, args.min_replicas, args.max_replicas, args.busy_slots)
        try:
            import ray
        except ImportError:
            raise ValueError("ray is not installed: pip install '.[ray]' in Tandem's folder") from None
        ray.init(address=args.address)
        start(args.grpc_port)
        run(config, args.flags)
    except (ValueError, ConnectionError) as error:
        print(f"{parser.prog}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
