"""The chat page in a browser: Enter sends, text is formatted and never HTML, rounds are the server's own."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.chromium import Page, browser, opened
from tests.support import ServerProcess, server_process

EXECUTABLE = browser()
pytestmark = pytest.mark.skipif(EXECUTABLE is None, reason="chromium is absent: apt install chromium")
TEXT = """# Head
Say `x` and **bold**, <b>no</b>

1. one
- two

```python
- x = 1
```
end"""
SHOWN = (
    "<p>Head</p><p><span>Say <code>x</code> and <strong>bold</strong>, &lt;b&gt;no&lt;/b&gt;</span></p>"
    '<ol><li value="1">one</li></ol><ul><li>two</li></ul><pre><code>- x = 1\n</code></pre><p><span>end</span></p>'
)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    flags = ("--role", "fused_target", "--http_port", "0", "--draft_model", "miss=0.3", "--model", "step=0.002")
    with server_process(tmp_path, *flags) as started:
        yield started


@pytest.fixture
def page(server: ServerProcess) -> Iterator[Page]:
    port = json.loads(server.ready_file.read_text())["http_port"]
    with opened(str(EXECUTABLE)) as made:
        made.show(f"http://127.0.0.1:{port}/", (390, 800))
        made.wait_for("document.getElementById('state').textContent.includes('ready')")
        yield made


def press(page: Page, **more: int) -> None:
    page.ask(
        "Input.dispatchKeyEvent", type="keyDown", key="Enter", code="Enter", windowsVirtualKeyCode=13, text="\r", **more
    )


def test_enter_sends_and_the_figures_are_the_servers_own(server: ServerProcess, page: Page) -> None:
    legend = "document.querySelector('#chat > small').offsetHeight"
    height = page.run(legend)
    page.run("at('prompt').focus(); at('prompt').value = 'hello'; at('max_tokens').value = 60")
    press(page, modifiers=8)
    assert page.run("at('prompt').value") == "hello\n"
    press(page)
    page.wait_for("document.querySelector('.figures') !== null && at('stop').disabled")
    assert page.run("at('prompt').value") == "" and page.run(legend) == height
    metrics = page.run("fetch('metrics').then(answer => answer.text())")
    (rounds,) = re.findall(r"^tandem:speculation_rounds_total\{.*\} (\d+)", metrics, re.MULTILINE)
    assert f"{rounds} rounds" in page.run("document.querySelector('.figures').textContent")
    assert page.run("document.querySelectorAll('.said .drafted').length") > 0
    assert page.run("document.documentElement.scrollWidth") == 390


def test_text_is_formatted_alike_wherever_its_parts_end_and_is_never_html(page: Page) -> None:
    page.run(f"var text = {json.dumps(TEXT)}")
    script = """cuts => { const into = document.createElement("div"), writer = new Writer(into);
        [0, ...cuts].forEach((cut, i) => writer.add(text.slice(cut, cuts[i] ?? text.length), ""));
        return into.innerHTML.replace(/ (class|style)="[^"]*"/g, ""); }"""
    assert page.run(f"({script})([])") == SHOWN
    assert page.run(f"[...text].map((_, i) => ({script})([i])).every(each => each === ({script})([]))")
    assert page.run(f"({script})([...text].map((_, i) => i)) === ({script})([])")
