"""From a comparison.json to a report that decides: HTML, Markdown, plots. Reads the parsed file and nothing else."""
