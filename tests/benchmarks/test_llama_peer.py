"""llama.cpp's server as a peer: its arguments, its answers, and a planted server that speaks as it does."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import stat
import sys
from pathlib import Path

import pytest

from benchmarks.llama_peer import Served, absence, asked, command, parse, running
from benchmarks.peers import PeerFailed
from benchmarks.process_groups import ProcessGroups
from tandem.comparison.measuring.servers import ServerFailed

PLANTED = """#!{python}
# Answers /completion as llama-server does: tokens count up from the prompt's last; id 13 is amid a character.
import json, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

flags = dict(zip(sys.argv[1:], sys.argv[2:]))
if flags["--model"].endswith("broken.gguf"):
    sys.exit("llama_model_load: error loading model")

class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args): pass

    def whole(self, said, status=200):
        body = json.dumps(said).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        self.whole({{"status": "ok", "build_info": "b0-planted"}})

    def chunk(self, said):
        line = b"data: " + json.dumps(said).encode() + b"\\n\\n"
        self.wfile.write(b"%x\\r\\n%s\\r\\n" % (len(line), line))

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not body["prompt"]:
            return self.whole({{"error": {{"code": 400, "message": "an empty prompt\\nand more"}}}}, 400)
        n = body["n_predict"]
        tokens = list(range(body["prompt"][-1] + 1, body["prompt"][-1] + 1 + n))
        last = {{"stop": True, "tokens": [], "tokens_predicted": n, "timings": {{"predicted_ms": 7.5 * (n - 1)}}}}
        if "--spec-draft-model" in flags:
            last["timings"] |= {{"draft_n": 9, "draft_n_accepted": 4}}
        if not body["stream"]:
            return self.whole(last | {{"tokens": tokens}})
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for token in tokens:
            if token != 13:
                self.chunk({{"index": 0, "content": "x", "tokens": [token], "stop": False, "tokens_predicted": n}})
        self.chunk(last)
        self.wfile.write(b"0\\r\\n\\r\\n")

ThreadingHTTPServer(("127.0.0.1", int(flags["--port"])), Handler).serve_forever()
"""


@pytest.fixture
def planted(tmp_path):
    """Runs `use` with a planted server of a file of this name."""
    program = tmp_path / "llama-server"
    program.write_text(PLANTED.format(python=sys.executable))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)

    def run(use, model="BF16.gguf", draft=None):
        async def inside():
            served = Served("llama.cpp BF16", "BF16", tmp_path / model, draft, 3)
            async with running(ProcessGroups(), str(program), served, 2, 4, 512, tmp_path / "log") as (server, info):
                return await use(server, info)

        return asyncio.run(inside())

    return run


def test_a_server_answers_one_prompt_or_many_and_describes_itself(planted):
    async def use(server, info):
        return info, await server.answer([7, 20], 5), await server.answer_all([[1], [5]], 2), server.said

    info, one, both, said = planted(use)
    assert (info.version, info.dtype, info.threads, info.interface) == ("b0-planted", "BF16", 2, "over HTTP")
    assert str(info) == "b0-planted, BF16, 2 threads, over HTTP"
    assert one.token_ids == (21, 22, 23, 24, 25)
    assert 0 < one.first_seconds == one.came[0] <= one.came[-1] <= one.seconds
    assert (one.first_tokens, len(one.came)) == (1, 5)
    assert [answered.token_ids for answered in both] == [(2, 3), (6, 7)]
    assert [completion.predicted_ms for completion in said] == [30.0, 7.5, 7.5]


def test_a_token_that_was_not_streamed_is_asked_for_again_and_unknown_among_many(planted):
    async def use(server, info):
        return await server.answer([10], 5), await server.answer_all([[10], [20]], 5)

    one, both = planted(use)
    assert (one.token_ids, len(one.came)) == ((11, 12, 13, 14, 15), 4)
    assert [answered.token_ids for answered in both] == [(11, 12, 14, 15, -1), (21, 22, 23, 24, 25)]


def test_drafts_are_counted(planted, tmp_path):
    async def use(server, info):
        await server.answer([1], 4)
        return server.said[0]

    said = planted(use, draft=tmp_path / "draft.gguf")
    assert (said.drafted, said.accepted) == (9, 4)


def test_what_a_server_refuses_is_one_line_and_it_goes_on(planted):
    async def use(server, info):
        with pytest.raises(PeerFailed, match=r"^llama\.cpp BF16: HTTP 400: an empty prompt$"):
            await server.answer([], 5)
        return await server.answer([1], 2)

    assert planted(use).token_ids == (2, 3)


def test_a_model_that_cannot_be_loaded_is_an_error_that_says_so(planted):
    with pytest.raises(ServerFailed, match=r"llama\.cpp BF16 ended with 1 while starting: llama_model_load"):
        planted(None, model="broken.gguf")


def test_no_process_is_left_when_the_benchmark_is_cancelled(planted):
    ports = []

    async def use(server, info):
        ports.append(server.port)
        raise asyncio.CancelledError

    async def connects():
        await asyncio.open_connection("127.0.0.1", ports[0])

    with contextlib.suppress(asyncio.CancelledError):
        planted(use)
    with pytest.raises(ConnectionRefusedError):
        asyncio.run(connects())


def event(**said):
    return f"data: {json.dumps({'stop': False, 'tokens': [], **said})}\n".encode()


def test_an_answer_that_breaks_off_or_fails_is_one_line():
    with pytest.raises(PeerFailed, match=r"^x: its answer ended after 1 tokens$"):
        parse([(0.1, event(tokens=[1])), (0.1, b"\n")], "x")
    failed = b'data: {"error": {"code": 500, "message": "context is full\\nmore"}}\n'
    with pytest.raises(PeerFailed, match=r"^x: context is full$"):
        parse([(0.1, event(tokens=[1])), (0.2, failed)], "x")
    with pytest.raises(PeerFailed, match=r"^x: no slot$"):
        parse([(0.2, b'error: {"message": "no slot"}\n')], "x")


def test_events_without_tokens_are_no_first_token():
    last = event(stop=True, tokens_predicted=2, timings={"predicted_ms": 5.0})
    events = [b": ping\n", b"data: null\n", event(), event(tokens=[5]), event(tokens=[6]), last]
    found = parse(zip((0.1, 0.2, 0.3, 0.4, 0.5, 0.6), events, strict=True), "x")
    assert (found.answered.first_seconds, found.answered.seconds, found.answered.came) == (0.4, 0.6, (0.4, 0.5))
    assert found.streamed


def test_the_server_gets_our_threads_a_context_for_every_slot_and_our_draft():
    plain = command("llama-server", Served("n", "BF16", Path("m.gguf")), 81, 2, 8, 512)
    flags = dict(itertools.pairwise(plain))
    assert (flags["--threads"], flags["--parallel"], flags["--ctx-size"], flags["--port"]) == ("2", "8", "4096", "81")
    assert "--no-cache-prompt" in plain and not [flag for flag in plain if "spec" in flag]
    with_draft = command("llama-server", Served("n", "BF16", Path("m.gguf"), Path("d.gguf"), 3), 81, 2, 8, 512)
    flags = dict(itertools.pairwise(with_draft))
    assert (flags["--spec-draft-model"], flags["--spec-draft-n-max"]) == ("d.gguf", "3")
    body = asked((5, 6), 9)
    assert (body["prompt"], body["n_predict"], body["top_k"], body["cache_prompt"]) == ([5, 6], 9, 1, False)


def test_an_absent_server_says_what_to_do(tmp_path):
    assert "install_llama_cpp.sh" in (absence(None) or "")
    assert absence(str(tmp_path)) == f"no llama.cpp: {tmp_path} is no program"
    assert absence(sys.executable) is None
