"""Serves the gateway's worker protocol, vllm.grpc.engine.VllmEngine, on a port of its own (docs/openai.md)."""
