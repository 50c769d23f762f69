"""Lets a draft model draft for a target with another vocabulary (docs/drafts.md)."""
