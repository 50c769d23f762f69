"""Asks a running server: `python examples/generate.py HOST:PORT`, after `tandem target` or `tandem fused_target`."""

import sys

from tandem import Client, SamplingParams

address = sys.argv[1] if len(sys.argv) > 1 else "localhost:50051"
with Client(address) as client:
    print(client.model_info().model_name)
    for chunk in client.stream("Why is the sky blue?", chat=True, max_new_tokens=64):
        print(chunk.text, end="", flush=True)
    print()

    sampling = SamplingParams(temperature=0.8, top_p=0.95, seed=1)
    print(client.generate("Once upon a time", sampling, max_new_tokens=40, timeout=60).text)
    print(f"{client.last_statistics.accepted} of {client.last_statistics.drafted} draft tokens were accepted")
