"""Turns a parsed comparison.json into a report: HTML, Markdown, plots, terminal."""
