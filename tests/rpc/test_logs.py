"""What of the gRPC library's own records becomes a line of the log."""

from __future__ import annotations

import subprocess
import sys

from tests.support import HANG, REPOSITORY

SAYS = """
import logging
from tandem.rpc import logs
logs.set_up("text")
grpc = logging.getLogger("grpc._cython.cygrpc")
try:
    raise RuntimeError('Failed "execute_batch"')
except RuntimeError:
    grpc.exception("ExecuteBatchError raised in core by servicer method [%s]", "/tandem.v1.TargetVerifier/Verify")
    grpc.exception("Unexpected [%s] raised by servicer method [%s]", "KeyError", "/tandem.v1.TargetVerifier/Verify")
"""


def test_a_reply_to_a_caller_who_has_just_left_is_no_error_and_a_failing_method_is() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SAYS], cwd=REPOSITORY, capture_output=True, text=True, timeout=HANG, check=True
    )
    assert "raised in core" not in done.stderr
    assert "Unexpected [KeyError]" in done.stderr and done.stderr.count("Traceback") == 1
