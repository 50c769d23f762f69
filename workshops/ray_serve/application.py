"""Deploys a server role on Ray Serve: autoscaled replicas behind its gRPC proxy.

    python -m tandem.workshops.ray_serve.application --neuron_cores 32 -- --role target --model DIR --batch 8

main.py's flags follow `--`. Run it once a role; roles share a cluster and port. Needs the extra `ray`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from tandem.cli.command_line import RoleParser
from tandem.cli.configuration import role_config
from tandem.installing import install_command
from tandem.workshops.ray_serve import forwarding


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="ray_serve", description="Deploy a server role on Ray Serve.")
    made.add_argument("--grpc_port", type=int, default=9000, help="Serve's gRPC port (default 9000)")
    made.add_argument("--neuron_cores", type=int, default=0, help="NeuronCores of a replica; logical cores on Trn2")
    made.add_argument("--cpus", type=float, default=1.0, help="CPUs of a replica (default 1)")
    for name in ("min", "max"):
        made.add_argument(f"--{name}_replicas", type=int, default=1, help=f"{name}imum number of replicas (default 1)")
    made.add_argument("flags", nargs="+", metavar="-- --role ROLE ...", help="main.py's flags")
    return made


def start(port: int, http_port: int = 8000, location: str = "EveryNode") -> None:
    """Starts Serve's proxies unless they run. `port`: gRPC."""
    from ray import serve
    from ray.serve.config import gRPCOptions

    grpc = gRPCOptions(port=port, grpc_servicer_functions=[f"{forwarding.__name__}.register"])
    # Serve kills a proxy that three checks of 5 s find not ready, and `serve.start` fails with it: too early for a
    # loaded machine. Three of 20 s are the 60 s for which `serve.start` waits.
    patience = {"runtime_env": {"env_vars": {"RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "20"}}}
    http = {"host": "127.0.0.1", "port": http_port}
    serve.start(proxy_location=location, http_options=http, grpc_options=grpc, controller_options=patience)


def run(flags: Sequence[str], neuron_cores: int = 0, cpus: float = 1.0, replicas: tuple[int, int] = (1, 1)) -> None:
    """Deploys a role and waits for a replica. Raises ValueError."""
    args = RoleParser().parse_args(flags)
    if args.role not in forwarding.SERVICES:
        raise ValueError(f"role: {args.role} is not one of {', '.join(forwarding.SERVICES)}")
    slots = role_config(args, args.model).models.shape.slots
    from ray import serve
    from ray.serve.config import AutoscalingConfig, RequestRouterConfig

    replica = forwarding.replica_of(args.role)
    deployment = serve.deployment(
        name=replica.__name__,
        ray_actor_options={"num_cpus": cpus, "resources": {"neuron_cores": neuron_cores} if neuron_cores else {}},
        max_ongoing_requests=16 * slots,  # the slots run out first
        autoscaling_config=AutoscalingConfig(
            min_replicas=replicas[0], max_replicas=replicas[1], target_ongoing_requests=0.75 * slots
        ),
        # Hashing the session's id keeps its calls on one replica. There is no fallback if it is busy, since no other
        # replica has the session: a full replica answers RESOURCE_EXHAUSTED, and clients wait.
        request_router_config=RequestRouterConfig(
            request_router_class="ray.serve.experimental.consistent_hash_router.ConsistentHashRouter",
            request_router_kwargs={"num_fallback_replicas": 0},
        ),
        graceful_shutdown_timeout_s=args.drain_seconds + 5,
        health_check_period_s=1,  # a dead replica is replaced, and its sessions move, within seconds
    )(replica)
    serve.run(deployment.bind(tuple(flags)), name=replica.__name__, route_prefix=f"/{replica.__name__}")


def main(argv: Sequence[str] | None = None) -> int:
    """Deploys a role. Returns 0, or 2 with the reason in one line on stderr."""
    args = vars(parser().parse_args(argv))
    try:
        start(args["grpc_port"])
        run(args["flags"], args["neuron_cores"], args["cpus"], (args["min_replicas"], args["max_replicas"]))
    except (ValueError, ConnectionError, ImportError) as error:
        why = f"ray is not installed: {install_command('ray')}" if isinstance(error, ImportError) else error
        print(f"ray_serve: {' '.join(str(why).split())}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
