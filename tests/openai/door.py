"""The HTTP port of a server that a test started as a user would, from its ready file."""

from __future__ import annotations

import json
import subprocess
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support import HANG

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "hello"}]
READY, LOG = "door.json", "door.log"


@dataclass(frozen=True)
class Door:
    port: int
    model: str

    def post(self, path: str, **body: Any) -> Any:
        """The JSON of the answer to a request, of a chat that says hello by default."""
        asked = {"model": self.model, **({"messages": HELLO} if path == CHAT else {}), **body}
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", json.dumps(asked).encode(), headers)
        with urllib.request.urlopen(request, timeout=HANG) as answer:
            return json.load(answer)


def wait_ready(process: subprocess.Popen[str], folder: Path) -> Door:
    """Waits until a server has written READY in the folder; its log is LOG."""
    give_up = time.monotonic() + 2 * HANG
    while not (folder / READY).exists():
        assert process.poll() is None and time.monotonic() < give_up, (folder / LOG).read_text()
        time.sleep(0.02)
    ready = json.loads((folder / READY).read_text())
    return Door(ready["http_port"], ready["model"])
