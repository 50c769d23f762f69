"""Workloads, metrics and reports: what a comparison measures and how it says it."""
