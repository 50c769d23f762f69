"""Becomes a part of the gateway: `python -m tandem.workshops.gateway.part PARENT COMMAND...`.

If the gateway is killed, the kernel kills its part. It does so on Linux alone; elsewhere a part goes on.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    parent, *command = sys.argv[1:]
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() == int(parent):  # else it has ended already
        os.execv(command[0], command)


if __name__ == "__main__":
    main()
