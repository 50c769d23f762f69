"""Runs main.py with the stand-in for NxD Inference, and a folder that is as S3 is by Mountpoint.

    python -m tests.runners.nxdi.s3like FOLDER main.py's arguments...

Below FOLDER a file can be created and written from its start, or read; renames, links, locks, appends, changes in place
and of modes are refused, by an audit hook that sees every such call of the process.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

REFUSED = ("os.rename", "os.link", "os.symlink", "os.chmod", "os.utime", "os.truncate", "os.chown")


class Refused(PermissionError):
    pass


def forbid(folder: Path) -> None:
    """Refuses from now on what Mountpoint refuses below `folder`."""
    root = str(folder.resolve()) + os.sep

    def below(path: object) -> bool:
        if isinstance(path, int):
            try:
                path = os.readlink(f"/proc/self/fd/{path}")
            except OSError:
                return False
        return isinstance(path, str | bytes | os.PathLike) and os.path.realpath(os.fsdecode(path)).startswith(root)

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if event == "open" and below(arguments[0]) and isinstance(arguments[2], int):
            flags = arguments[2]
            if flags & os.O_APPEND or flags & os.O_RDWR or (flags & os.O_WRONLY and not flags & os.O_TRUNC):
                raise Refused(f"{arguments[0]}: opened to change it in place")
        elif event in REFUSED and any(below(argument) for argument in arguments[:2]):
            raise Refused(f"{event} of {arguments[:2]}")
        elif event == "fcntl.flock" and below(arguments[0]):
            raise Refused("locked")

    sys.addaudithook(hook)


def main() -> int:
    from tandem.cli.main import main as run
    from tandem_nxdi.backend import BACKEND
    from tests.runners.nxdi import simulated
    from tests.toy import ToyTokenizer

    forbid(Path(sys.argv[1]))
    simulated.install(pytest.MonkeyPatch())
    BACKEND.tokenizer = lambda checkpoint: ToyTokenizer()  # type: ignore[method-assign]
    return run(sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
