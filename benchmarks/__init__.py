"""Benchmarks that compare Tandem with other software. Run them from the repository root; see README.md."""
