"""`import tandem`: what it offers, and what it loads."""

from __future__ import annotations

import subprocess
import sys

import pytest

import tandem
from tests.support import REPOSITORY

HEAVY = ("torch", "transformers", "tokenizers", "safetensors")


def python(code: str, *flags: str) -> str:
    run = subprocess.run([sys.executable, *flags, "-c", code], cwd=REPOSITORY, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


def test_importing_tandem_loads_the_standard_library_alone() -> None:
    """Some of our processes run without site-packages."""
    loaded = python("import sys, tandem; print(*sorted(n for n in sys.modules if n.startswith('tandem')))", "-ESs")
    assert loaded == "tandem"


def test_the_client_loads_no_model_library() -> None:
    code = f"import sys, tandem\ntandem.Client, tandem.DraftSession\nprint(*({set(HEAVY)} & sys.modules.keys()))"
    assert python(code) == ""


@pytest.mark.parametrize("name", [name for name in tandem.__all__ if name != "compare"])
def test_a_public_name_is_there_and_documented(name: str) -> None:
    value = getattr(tandem, name)
    assert value.__name__ == name and value.__doc__ and not value.__doc__.startswith(f"{name}(")
    assert name in dir(tandem)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="nobody"):
        _ = tandem.nobody
