"""Draft models of another vocabulary than the target's (docs/drafts.md)."""
