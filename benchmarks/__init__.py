"""Compares Tandem with other software. Run from the repository root; see README.md."""
