"""Everything that listens: the three gRPC services, their sessions and their bootstrap."""
