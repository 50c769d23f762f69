"""The algorithm, pure: draft, verify, commit. Knows no gRPC and no model library."""
