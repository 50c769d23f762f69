"""Answers of another engine, settled: plain decoding of the target to the bit, whatever the engine says."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import signal
import subprocess
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import tandem
from tandem.receipts.keys import signature_right
from tandem.receipts.receipt import read_signed
from tests.support import GREEDY, SAMPLED, ServerProcess, command, oracle, run, run_here, server_process, until

COUNT = 60
DOWN = "openai=http://127.0.0.1:9"  # nothing listens there
Reply = Callable[[list[int]], list[Any]]


def plain(body: dict[str, Any]) -> list[int]:
    prompt = body["prompt"].encode() if isinstance(body["prompt"], str) else body["prompt"]
    return list(oracle(prompt, SAMPLED if body["temperature"] else GREEDY, body["max_tokens"], past_the_end=True))


def said(tokens: list[int], ids: bool = True) -> list[Any]:
    text = "".join(map(chr, (each for each in tokens if 0 <= each < 256)))
    return [{"choices": [{"text": text, **({"token_ids": tokens} if ids else {})}]}, "data: [DONE]"]


WHOLE: Reply = lambda tokens: said(tokens)  # noqa: E731
REPLIES: dict[str, Reply] = {
    "planted": lambda tokens: said([*tokens[:9], 7, *tokens[10:20], *tokens[21:30], 7, *tokens[30:]]),
    "text": lambda tokens: said(tokens, ids=False),
    "nothing": lambda tokens: ["data: [DONE]"],
    "cut": lambda tokens: said(tokens[:5])[:1],
    "too long": lambda tokens: said([*tokens, 1]),
    "a long text": lambda tokens: [{"choices": [{"text": "a" * 65 * COUNT}]}],
    "outside the vocabulary": lambda tokens: said([*tokens[:3], 10**6]),
    "no numbers": lambda tokens: [{"choices": [{"text": "a", "token_ids": ["x"]}]}],
    "endless numbers": lambda tokens: ['data: {"choices": [{"text": "a", "token_ids": [1e999]}]}'],
    "no text": lambda tokens: [{"choices": [{"text": 5}]}],
    "a lone surrogate": lambda tokens: ['data: {"choices": [{"text": "\\ud800"}]}'],
    "deep": lambda tokens: ["data: " + "[" * 100_000],
}
FAILING = list(REPLIES)[4:]


@contextlib.contextmanager
def engine(reply: Reply, port: int = 0) -> Iterator[str]:
    """An OpenAI server that knows the target's answers, and says `reply` of them."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send(json.dumps({"data": [{"id": "a model"}]}))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            lines = [each if isinstance(each, str) else f"data: {json.dumps(each)}" for each in reply(plain(body))]
            self._send("\n\n".join([*lines, ""]))

        def _send(self, text: str) -> None:
            self.send_response(200)
            self.end_headers()
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it heard enough
                self.wfile.write(text.encode())

        def log_message(self, *said: Any) -> None:
            """Says nothing."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"openai=http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def body(prompt: str, sampled: bool = False, **more: Any) -> dict[str, Any]:
    names = ("temperature", "top_k", "top_p", "min_p", "seed")
    drawn = {name: getattr(SAMPLED if sampled else GREEDY, name) for name in names}
    return {"prompt": prompt, "max_tokens": COUNT, "ignore_eos": True, "return_token_ids": True, **drawn, **more}


def write(path: Path, lines: list[Any]) -> None:
    path.write_text("".join(f"{each if isinstance(each, str) else json.dumps(each)}\n" for each in lines))


def settling(address: str, *more: str) -> tuple[str, ...]:
    return ("settle", "in.jsonl", "--engine", address, "--output", "out.jsonl", "--backend", "toy", *more)


def rows(folder: Path) -> dict[str, Any]:
    found = [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]
    assert len({each["custom_id"] for each in found}) == len(found)
    return {each["custom_id"]: each for each in found}


@pytest.mark.parametrize("name", REPLIES)
def test_whatever_an_engine_says_the_answer_is_plain_decodings_with_a_receipt(tmp_path: Path, name: str) -> None:
    asked = [body(f"prompt {i}", sampled=i % 2 == 1) for i in range(4)]
    write(tmp_path / "in.jsonl", asked)
    with engine(REPLIES[name]) as address:
        done = run_here(tmp_path, *settling(address, "--reconnect_seconds", "0"))
    assert done.returncode == 0, done.stderr
    for i, each in enumerate(asked, 1):
        row = rows(tmp_path)[str(i)]
        choice, figures = row["response"]["body"]["choices"][0], row["settled"]
        assert choice["token_ids"] == plain(each)
        signed = read_signed(json.dumps(choice["receipt"]))
        assert signature_right(signed) and list(signed.receipt.token_ids) == choice["token_ids"]
        assert bool(figures["failure"]) == (name in FAILING)
        assert figures["unchanged"] == (name == "text")
        if name == "planted":
            assert (figures["agreed"], figures["written"]) == (9, COUNT)


def test_a_whole_answer_is_verified_in_steps_as_wide_as_a_prompts(tmp_path: Path) -> None:
    from tests.runners.tiny import model_folder

    model = str(model_folder(tmp_path / "model", 1))
    flags = ("--role", "target", "--model", model, "--sequence_length", "512", "--port", "0", "--http_port", "0")
    with contextlib.ExitStack() as closing:
        server = ServerProcess(tmp_path, *flags)
        closing.callback(server.process.wait)
        closing.callback(server.process.kill)
        server.wait_ready()
        options: Any = {"model": model, "max_new_tokens": 200, "ignore_end_of_sequence": True}
        engine_of_ours = f"openai=http://127.0.0.1:{json.loads(server.ready_file.read_text())['http_port']}"
        found = tandem.settle(["hello", "again"], engine=engine_of_ours, receipt_keys=tmp_path / "keys", **options)
    for each in found:
        assert each.unchanged and each.agreed == each.written == 200 and read_signed(each.completion.receipt)
        assert each.completion.statistics.rounds <= 8


def test_a_run_that_is_killed_goes_on_where_it_was_and_loses_nothing(tmp_path: Path) -> None:
    asked = [body(f"prompt {i}") for i in range(40)]
    write(tmp_path / "in.jsonl", asked)
    output = tmp_path / "out.jsonl"
    slow = settling(DOWN, "--reconnect_seconds", "0", "--model", "step=0.02", "--batch", "2")
    with subprocess.Popen(command(*slow), cwd=tmp_path, stderr=subprocess.DEVNULL) as killed:
        run(until(lambda: output.exists() and output.read_bytes().count(b"\n") >= 2))
        second = run_here(tmp_path, *settling(DOWN))
        assert (second.returncode, second.stderr.count("\n")) == (2, 1) and "another run is writing it" in second.stderr
        os.kill(killed.pid, signal.SIGKILL)
    before = output.read_bytes()
    with output.open("ab") as file:
        file.write(b'{"custom_id": "39", "req')  # a kill may come in the middle of a line
    with engine(WHOLE) as address:
        done = run_here(tmp_path, *settling(address, "--model", "step=0.02"))
    assert done.returncode == 0, done.stderr
    assert output.read_bytes().startswith(before) and set(rows(tmp_path)) == {str(i) for i in range(1, 41)}
    for i, each in enumerate(asked, 1):
        assert rows(tmp_path)[str(i)]["response"]["body"]["choices"][0]["token_ids"] == plain(each)


def test_an_engine_that_is_killed_is_waited_for_and_asked_again(tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", [body("prompt")])
    with engine(WHOLE) as address:
        pass
    port = int(address.rpartition(":")[2])
    with subprocess.Popen(command(*settling(address)), cwd=tmp_path, stderr=subprocess.PIPE) as settles:
        run(until(lambda: (tmp_path / "out.jsonl").exists()))
        with engine(WHOLE, port):
            assert settles.wait(60) == 0, settles.stderr and settles.stderr.read()
    assert rows(tmp_path)["1"]["settled"]["unchanged"]


BATCH = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions"}
CHAT = {"model": "gpt", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "temperature": 0}


def test_openais_batches_are_read_and_answered_in_their_form(tmp_path: Path) -> None:
    write(
        tmp_path / "in.jsonl",
        [{**BATCH, "body": CHAT}, {**BATCH, "custom_id": "b", "body": {**CHAT, "max_tokens": 999}}],
    )
    with engine(WHOLE) as address:
        done = run_here(tmp_path, *settling(address))
    assert done.returncode == 1 and "b: the prompt has 2 tokens and max_new_tokens is 999" in done.stderr
    found = rows(tmp_path)
    assert found["a"]["response"]["status_code"] == 200 and found["a"]["error"] is None
    assert found["a"]["response"]["body"]["choices"][0]["message"]["role"] == "assistant"
    assert found["b"]["response"] is None and found["b"]["error"]["code"] == "OUT_OF_RANGE"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("[1]", "line 2: body: not a JSON object"),
        ("{" * 100_000, "line 2: body: n"),
        ({"prompt": "a", "promt": "b"}, "line 2: promt: not a field of completions"),
        ({"prompt": "a", "n": 2}, "line 2: n: a line has one prompt and one answer"),
        ({"max_tokens": 5}, "line 2: prompt: missing"),
        ({**BATCH, "body": {"prompt": "a"}}, "line 2: prompt: not a field of chat"),
        ({**BATCH, "url": "/v1/embeddings", "body": {}}, "line 2: request.url: '/v1/embeddings' is not one of"),
        ({**BATCH, "custom_id": "1", "body": CHAT}, "line 2: custom_id: '1' is of an earlier line too"),
        ({**BATCH, "custom_id": "a" * 300, "body": CHAT}, "line 2: custom_id: length 300 is outside 1 to 256"),
        ("a" * 17 * 2**20, "line 2: more than 16777216 bytes"),
    ],
)
def test_what_a_line_of_the_input_must_not_be_is_refused_in_one_line(tmp_path: Path, line: Any, said: str) -> None:
    write(tmp_path / "in.jsonl", [body("a"), line])
    done = run_here(tmp_path, *settling(DOWN))
    assert done.returncode == 2 and said in done.stderr and done.stderr.count("\n") == 1


WRONG = {
    ("--engine", "http://127.0.0.1:9"): "is not openai=URL",
    ("--engine", "openai=ftp://a"): "is not http://HOST:PORT",
    ("--input", "none.jsonl"): "input: none.jsonl: No such file",
    ("--output", "."): "output: .: Is a directory",
}


@pytest.mark.parametrize("flags", WRONG)
def test_what_a_command_lacks_is_named(tmp_path: Path, flags: tuple[str, ...]) -> None:
    write(tmp_path / "in.jsonl", [body("a")])
    done = run_here(tmp_path, *settling(DOWN), *flags)
    assert done.returncode == 2 and WRONG[flags] in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize("change", ["seed", "name", "twice", "shape", "model"])
def test_a_file_of_other_answers_is_not_gone_on_with(tmp_path: Path, change: str) -> None:
    write(tmp_path / "in.jsonl", [body("a")])
    assert run_here(tmp_path, *settling(DOWN, "--reconnect_seconds", "0")).returncode == 0
    output = tmp_path / "out.jsonl"
    line = output.read_text()
    if change == "seed":
        write(tmp_path / "in.jsonl", [body("a", seed=8)])
    changed = {"name": line.replace('"custom_id": "1"', '"custom_id": "2"'), "twice": 2 * line, "shape": "[]\n"}
    output.write_text(changed.get(change, line))
    done = run_here(tmp_path, *settling(DOWN, "--model", "salt=1" if change == "model" else "salt=0"))
    assert done.returncode == 2 and "output: out.jsonl, line " in done.stderr and "name another file" in done.stderr
    assert done.stderr.count("\n") == 1 and output.read_text() == changed.get(change, line)


@pytest.mark.parametrize("name", ["planted", "text", "too long", "deep", "down"])
def test_a_server_settles_what_the_engine_behind_it_writes(tmp_path: Path, name: str) -> None:
    with engine(REPLIES.get(name, WHOLE)) as address, serving(tmp_path, DOWN if name == "down" else address) as url:
        for sampled in (False, True):
            asked = body("hello", sampled)
            answer = post(url, asked)
            assert answer["choices"][0]["token_ids"] == plain(asked)
            drafted = answer["usage"]["completion_tokens_details"]["accepted_prediction_tokens"]
            assert (drafted > 0) == (name in ("planted", "text"))


@contextlib.contextmanager
def serving(folder: Path, address: str) -> Iterator[str]:
    flags = ("--role", "fused_target", "--draft", "ngram", "--http_port", "0", "--settle", address)
    with server_process(folder, *flags) as server:
        yield f"http://127.0.0.1:{json.loads(server.ready_file.read_text())['http_port']}/v1/completions"


def post(url: str, asked: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(url, json.dumps(asked).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        found: dict[str, Any] = json.loads(answer.read())
    return found
