"""The single place for channel options, and for which stub belongs to which service."""

from __future__ import annotations

import json
from typing import Any

import grpc

from tandem.v1 import (
    draft_worker_pb2,
    draft_worker_pb2_grpc,
    fused_speculative_server_pb2,
    fused_speculative_server_pb2_grpc,
    target_verifier_pb2,
    target_verifier_pb2_grpc,
)

TARGET, FUSED, DRAFT = "TargetVerifier", "FusedSpeculativeServer", "DraftWorker"

MESSAGES: dict[str, Any] = {
    TARGET: target_verifier_pb2,
    FUSED: fused_speculative_server_pb2,
    DRAFT: draft_worker_pb2,
}
_STUBS: dict[str, Any] = {
    TARGET: target_verifier_pb2_grpc.TargetVerifierStub,
    FUSED: fused_speculative_server_pb2_grpc.FusedSpeculativeServerStub,
    DRAFT: draft_worker_pb2_grpc.DraftWorkerStub,
}

# Only UNAVAILABLE is retried, only on calls that are idempotent: every Verify with the same fence gives the same reply,
# every Propose with the same tokens the same proposal.
_IDEMPOTENT = {TARGET: ("OpenSession", "Verify", "CloseSession"), DRAFT: ("Propose", "EndProposals")}
_SERVICE_CONFIG = {
    "methodConfig": [
        {
            "name": [
                {"service": f"tandem.v1.{service}", "method": method}
                for service, methods in _IDEMPOTENT.items()
                for method in methods
            ],
            "retryPolicy": {
                "maxAttempts": 3,
                "initialBackoff": "0.02s",
                "maxBackoff": "0.5s",
                "backoffMultiplier": 3,
                "retryableStatusCodes": ["UNAVAILABLE"],
            },
        }
    ]
}
_OPTIONS = (
    ("grpc.service_config", json.dumps(_SERVICE_CONFIG)),
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.use_local_subchannel_pool", 1),
    # A server that was restarted is found again within seconds; by default a channel may wait for two minutes.
    ("grpc.max_reconnect_backoff_ms", 2_000),
)


def open_channel(address: str) -> grpc.aio.Channel:
    """An insecure channel to host:port."""
    return grpc.aio.insecure_channel(address, options=_OPTIONS)


def stub(channel: grpc.aio.Channel, service: str) -> Any:
    """The stub of one of the three services."""
    return _STUBS[service](channel)
