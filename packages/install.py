"""Installs packages with uv, or with pip where uv does not: `python packages/install.py [arguments of pip install]`."""

from __future__ import annotations

import ast
import os
import subprocess
import sys

UV = "uv==0.13.9"
DEFAULTS = ("--compile-bytecode", "--index-strategy", "unsafe-best-match")  # as pip: the best release of all indexes
PIP = [sys.executable, "-m", "pip"]
INSTALL = [*PIP, "install", "--disable-pip-version-check"]
SETTINGS = ("index-url", "extra-index-url", "find-links", "constraint", "trusted-host", "no-binary", "only-binary")


def main(arguments: list[str]) -> int:
    """Returns the exit code."""
    if subprocess.run([*INSTALL, "--quiet", UV], check=False).returncode == 0:
        flags, certificates = pip_settings()
        command = [sys.executable, "-m", "uv", "pip", "install", "--python", sys.executable, *DEFAULTS, *flags]
        if subprocess.run([*command, *arguments], env=os.environ | certificates, check=False).returncode == 0:
            return 0
        print("uv could not install this; pip tries", file=sys.stderr)
    return subprocess.run([*INSTALL, *arguments], check=False).returncode


def pip_settings() -> tuple[list[str], dict[str, str]]:
    """Returns pip's settings as flags and environment variables of uv, which does not read them itself."""
    listed = subprocess.run([*PIP, "config", "list"], capture_output=True, text=True, check=False).stdout.splitlines()
    found = dict[str, str]()
    for line in sorted(listed, key=lambda line: line.startswith(":env:")):  # variables come before files
        name, _, value = line.partition("=")
        found[name.rpartition(".")[2]] = ast.literal_eval(value)
    flags = [word for name in SETTINGS for value in found.get(name, "").split() for word in (f"--{name}", value)]
    no_index = found.get("no-index", "0").lower() in {"1", "true", "yes", "on"}
    return flags + ["--no-index"] * no_index, {"SSL_CERT_FILE": found["cert"]} if "cert" in found else {}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
