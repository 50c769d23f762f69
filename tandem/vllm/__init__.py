"""A drafter class for vLLM's --speculative-config, using remote DraftWorkers (docs/vllm.md); imports no vLLM."""

from __future__ import annotations

from tandem.vllm.drafter import RemoteDrafter as RemoteDrafter
