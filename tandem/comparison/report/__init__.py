"""Shows a comparison: page, terminal, files."""
