"""Measurements that say how fast Tandem is beside something else. Run from the repository root, see README.md."""
