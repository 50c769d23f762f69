"""Speculative decoding itself: draft, verify, commit. Depends on neither gRPC nor a model library."""
