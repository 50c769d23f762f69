"""Shows a comparison: one page, the terminal, and files."""
