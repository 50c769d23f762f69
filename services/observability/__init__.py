"""A server's metrics, request log and traces."""
