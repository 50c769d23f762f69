"""Shared by both ends of a connection: messages, channels, credentials, errors, tracing, remote models."""
