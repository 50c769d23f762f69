"""Run as a Python that has vLLM: it says so, and serves the OpenAI API with vLLM's counters, without any model.

Its text is always 1, 2, 3, ...; with drafts, steps commit two tokens. FAKE_VLLM: "leaves", the text of a server with
drafts differs from its fifth token on; "fails", such a server does not start; "wavers", each text differs from the one
before it at its fourth token.
"""

from __future__ import annotations

import http.server
import json
import os
import sys
import threading
from typing import Any

COUNTED: dict[str, int] = {}
DRAFTER: dict[str, int] = {}


def flag(name: str, default: str = "") -> str:
    return sys.argv[sys.argv.index(name) + 1] if name in sys.argv else default


DRAFTS = json.loads(flag("--speculative-config", "{}"))
PLAN = os.environ.get("FAKE_VLLM", "")


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self.say(json.dumps({"data": [{"id": flag("--model"), "max_model_len": 64}]}))
        elif self.path == "/version":
            self.say(json.dumps({"version": "0.0.fake"}))
        else:
            self.say("".join(f"{name} {value}\n" for name, value in COUNTED.items()) if self.path == "/metrics" else "")

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        tokens = list(range(1, asked["max_tokens"] + 1))
        if DRAFTS and PLAN == "leaves":
            tokens[4] = 99
        if PLAN == "wavers":
            tokens[3] = 100 + COUNTED.get("vllm:generation_tokens_total", 0)
        width = 2 if DRAFTS else 1
        steps = [tokens[:1], *(tokens[i : i + width] for i in range(1, len(tokens), width))]
        self.count(tokens, steps)
        events = [{"choices": [{"text": "x" * len(step), "token_ids": step}]} for step in steps]
        usage = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": len(tokens)}}
        self.say("".join(f"data: {json.dumps(event)}\n\n" for event in [*events, usage]) + "data: [DONE]\n\n")

    def count(self, tokens: list[int], steps: list[list[int]]) -> None:
        add(COUNTED, "vllm:generation_tokens_total", len(tokens))
        add(COUNTED, "vllm:iteration_tokens_total_count", len(steps))
        if DRAFTS:
            k, accepted = DRAFTS["num_speculative_tokens"], len(tokens) - len(steps)
            add(COUNTED, "vllm:spec_decode_num_drafts_total", len(steps) - 1)
            add(COUNTED, "vllm:spec_decode_num_draft_tokens_total", k * (len(steps) - 1))
            add(COUNTED, "vllm:spec_decode_num_accepted_tokens_total", accepted)
            for i in range(k):
                label = f'{{engine="0",position="{i}"}}'
                add(COUNTED, f"vllm:spec_decode_num_accepted_tokens_per_pos_total{label}", 0 if i else accepted)
            add(DRAFTER, 'tandem:vllm_draft_tokens_total{source="arrived"}', k * (len(steps) - 1))
            add(DRAFTER, 'tandem:vllm_accepted_tokens_total{source="arrived"}', accepted)

    def say(self, text: str) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *said: Any) -> None:
        """Says nothing."""


class OfDrafter(Handler):
    def do_GET(self) -> None:
        self.say("".join(f"{name} {value}\n" for name, value in DRAFTER.items()))


def add(counts: dict[str, int], name: str, by: int) -> None:
    counts[name] = counts.get(name, 0) + by


def serve(port: int, handler: type[Handler]) -> http.server.ThreadingHTTPServer:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", port), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def main() -> None:
    if sys.argv[1] == "-c":
        print(json.dumps({"version": "0.0.fake", "device": "cpu", "drafter": ""}))
        return
    if DRAFTS and PLAN == "fails":
        sys.exit("no memory for the drafts")
    if port := os.environ.get("TANDEM_DRAFT_METRICS_PORT"):
        assert os.environ["TANDEM_DRAFT_WORKERS"] and os.environ["TANDEM_DRAFT_FORM"]
        serve(int(port), OfDrafter)
    serve(int(flag("--port")), Handler)
    threading.Event().wait()


if __name__ == "__main__":
    main()
