"""Commands that install missing libraries, by how Tandem was installed."""

from __future__ import annotations

import json
import shlex
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

DISTRIBUTION = "tandem-speculative"
IN_A_CHECKOUT = "make setup"
_ROOT = Path(__file__).resolve().parents[1]


def install_command(extra: str) -> str:
    """The command that adds an extra to this installation, or to a checkout's environment.

    Where no model can be loaded, parts of a server are of no use without the rest: all of `serve`.
    """
    extra = "serve" if extra in ("http", "weights") and find_spec("tokenizers") is None else extra
    try:
        source = metadata.distribution(DISTRIBUTION).read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        return IN_A_CHECKOUT if (_ROOT / "Makefile").is_file() else _from_index(extra)
    try:
        return _from_url(json.loads(source), extra) if source else _from_index(extra)
    except (ValueError, KeyError, TypeError, AttributeError):  # a file that another program wrote
        return _from_index(extra)


def check_installed(flag: str, extra: str, *libraries: str) -> None:
    """Raises ValueError naming the first missing library."""
    for library in libraries:
        if find_spec(library) is None:
            raise ValueError(f"{flag}: {library} is not installed; {install_command(extra)}")


def _from_index(extra: str) -> str:
    return f"pip install {shlex.quote(f'{DISTRIBUTION}[{extra}]')}"


def _from_url(source: dict[str, Any], extra: str) -> str:
    """The command for a folder, file or repository that PEP 610 records."""
    url, wanted = source["url"], f"{DISTRIBUTION}[{extra}]"
    if "vcs_info" in source:
        system, commit = source["vcs_info"]["vcs"], source["vcs_info"]["commit_id"]
        return f"pip install {shlex.quote(f'{wanted} @ {system}+{url}@{commit}')}"
    if urlsplit(url).scheme != "file":
        return f"pip install {shlex.quote(f'{wanted} @ {url}')}"
    path = Path(unquote(urlsplit(url).path))
    if "dir_info" in source:
        editable = "-e " if source["dir_info"].get("editable") else ""
        return f"pip install {editable}{shlex.quote(f'{path}[{extra}]')}"
    return f"pip install --find-links {shlex.quote(str(path.parent))} {shlex.quote(wanted)}"
