"""Shared by both ends of a connection: messages, channels, credentials, errors, tracing, remote models."""

import os

# gRPC reads it as it is imported. With its own handlers of forks, it aborts some children as they are forked (grpcio
# 1.83: 4 of 25), before a client can say that it does not go through a fork.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
