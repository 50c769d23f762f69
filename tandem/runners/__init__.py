"""The Runner protocol and its implementations."""
