"""A drafter class for vLLM's --speculative-config, using remote DraftWorkers (docs/vllm.md).

Imports no vLLM; vLLM's environment needs the light client.
"""

from __future__ import annotations

from tandem.vllm.drafter import RemoteDrafter as RemoteDrafter
