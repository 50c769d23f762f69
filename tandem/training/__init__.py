"""Making draft models."""
