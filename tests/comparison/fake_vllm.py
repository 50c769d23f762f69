"""Serves the OpenAI API with vLLM's counters, without any model: `python fake_vllm.py DRAFTS PLAN` prints its port.

Its text is always 1, 2, 3, ...; with DRAFTS tokens a draft, steps commit two tokens. PLAN: "leaves", the text differs
from its fifth token on.
"""

from __future__ import annotations

import http.server
import json
import sys
from typing import Any

COUNTED: dict[str, int] = {}
DRAFTS, PLAN = int(sys.argv[1]), sys.argv[2]


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        pages = {
            "/v1/models": json.dumps({"data": [{"id": "m", "max_model_len": 64}]}),
            "/version": json.dumps({"version": "0.0.fake"}),
            "/metrics": "".join(f"{name} {value}\n" for name, value in COUNTED.items()),
        }
        self.answer(pages[self.path])

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        tokens = list(range(1, asked["max_tokens"] + 1))
        if PLAN == "leaves":
            tokens[4] = 99
        width = 2 if DRAFTS else 1
        steps = [tokens[:1], *(tokens[i : i + width] for i in range(1, len(tokens), width))]
        self.count(tokens, steps)
        events = [{"choices": [{"text": "x" * len(step), "token_ids": step}]} for step in steps]
        usage = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": len(tokens)}}
        self.answer("".join(f"data: {json.dumps(event)}\n\n" for event in [*events, usage]) + "data: [DONE]\n\n")

    def count(self, tokens: list[int], steps: list[list[int]]) -> None:
        add("vllm:generation_tokens_total", len(tokens))
        add("vllm:iteration_tokens_total_count", len(steps))
        if DRAFTS:
            accepted = len(tokens) - len(steps)
            add("vllm:spec_decode_num_drafts_total", len(steps) - 1)
            add("vllm:spec_decode_num_draft_tokens_total", DRAFTS * (len(steps) - 1))
            add("vllm:spec_decode_num_accepted_tokens_total", accepted)
            for i in range(DRAFTS):
                label = f'{{engine="0",position="{i}"}}'
                add(f"vllm:spec_decode_num_accepted_tokens_per_pos_total{label}", 0 if i else accepted)

    def answer(self, text: str) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *said: Any) -> None:
        """Says nothing."""


def add(name: str, by: int) -> None:
    COUNTED[name] = COUNTED.get(name, 0) + by


if __name__ == "__main__":
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(server.server_port, flush=True)
    server.serve_forever()
