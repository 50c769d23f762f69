"""Drives headless chromium through its debugging pipe, without a library."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
QUIETLY = (
    "--headless",
    "--no-sandbox",  # for root in a container; the pages are our own
    "--disable-gpu",
    "--disable-quic",
    "--disable-sync",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
# the browser reads commands from descriptor 3 and answers on 4
ON_ITS_PIPE = 'exec "$0" "$@" 3<&0 4>&1 </dev/null >/dev/null'
PATIENCE_S = 60.0


def browser() -> str | None:
    """Returns the path of a browser, if any."""
    return next((path for name in BROWSERS if (path := shutil.which(name))), None)


@dataclass
class Page:
    """One page of a running browser. Its errors are RuntimeErrors."""

    commands: IO[bytes]
    answers: IO[bytes]
    session: str | None = None
    count: int = 0

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        self.count += 1
        said = {"id": self.count, "method": method, "params": params}
        said |= {"sessionId": self.session} if self.session else {}
        self.commands.write(json.dumps(said).encode() + b"\0")
        self.commands.flush()
        while True:
            answer = json.loads(self._message())
            if answer.get("id") == self.count:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return dict(answer["result"])

    def _message(self) -> bytes:
        read = bytearray()
        while (byte := self.answers.read(1)) != b"\0":
            if not byte:
                raise RuntimeError("the browser ended")
            read += byte
        return bytes(read)

    def show(self, url: str, size: tuple[int, int], dark: bool = False) -> None:
        """Loads a page in a window of `size` CSS pixels, completely."""
        self.ask("Emulation.setDeviceMetricsOverride", width=size[0], height=size[1], deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[scheme])
        self.ask("Page.navigate", url=url)
        self.wait_for("location.href !== 'about:blank' && document.readyState === 'complete'")

    def run(self, script: str) -> Any:
        """Evaluates a script and returns its value."""
        found = self.ask("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise RuntimeError(f"{script}: {found['exceptionDetails']['text']}")
        return found["result"].get("value")

    def wait_for(self, condition: str) -> None:
        until = time.monotonic() + PATIENCE_S
        while not self.run(condition):
            if time.monotonic() > until:
                raise RuntimeError(f"{condition} did not become true in {PATIENCE_S:g} s")
            time.sleep(0.1)

    def picture(self) -> bytes:
        """Returns the window as PNG."""
        return base64.b64decode(self.ask("Page.captureScreenshot", format="png")["data"])


@contextmanager
def opened(executable: str) -> Iterator[Page]:
    """Runs a browser with a fresh profile during the block."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = ["sh", "-c", ON_ITS_PIPE, executable, *QUIETLY, f"--user-data-dir={Path(profile)}"]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        ) as process:
            assert process.stdin is not None and process.stdout is not None
            try:
                page = Page(process.stdin, process.stdout)
                target = page.ask("Target.createTarget", url="about:blank")["targetId"]
                page.session = page.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
                yield page
            finally:
                process.kill()
