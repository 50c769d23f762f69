"""A drafter for vLLM that asks DraftWorkers elsewhere: the `model` of its --speculative-config is the class's name.

docs/vllm.md is its page. vLLM's environment needs what the light client needs, and nothing here imports vLLM.
"""

from __future__ import annotations

from tandem.vllm.drafter import RemoteDrafter as RemoteDrafter
