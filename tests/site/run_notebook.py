"""Runs a notebook and prints what its code cells said, as a JSON list. Exits with 1 if a cell fails.

.venv-docs/bin/python tests/site/run_notebook.py FILE
"""

import json
import sys

import nbformat
from nbclient import NotebookClient

notebook = nbformat.read(sys.argv[1], as_version=4)
NotebookClient(notebook, timeout=300).execute()
cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
said = [
    [output.get("text") or output.get("data", {}).get("text/plain", "") for output in cell.outputs] for cell in cells
]
print(json.dumps(["".join(texts) for texts in said]))
