"""A toy server whose background tasks fail for as long as a file is there.

    python -m tests.services.failing_tasks FILE --role target --backend toy ...

The word in the file says which: "expiry" or "watch". What follows are main.py's arguments.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tandem.cli import main
from tandem.engine.step_watch import StepWatch
from tandem.services.sessions.table import SessionTable


def failing(method: Callable[..., Any], gate: Path, word: str) -> Callable[..., Any]:
    def fails(*arguments: Any) -> Any:
        if gate.exists() and gate.read_text() == word:
            raise OSError(f"the {word} fails")
        return method(*arguments)

    return fails


if __name__ == "__main__":
    file = Path(sys.argv[1])
    SessionTable.seconds_to_expiry = failing(SessionTable.seconds_to_expiry, file, "expiry")  # type: ignore[method-assign]
    StepWatch.look = failing(StepWatch.look, file, "watch")  # type: ignore[method-assign]
    sys.exit(main.main(sys.argv[2:]))
