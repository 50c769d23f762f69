"""Speculative decoding across a network.

    from tandem import Client

    with Client("localhost:50051") as client:
        print(client.generate("Why is the sky blue?", chat=True, max_new_tokens=60).text)

Client and AsyncClient call any Tandem server, DraftSession verifies an object's drafts at a TargetVerifier, and
compare measures architectures. Names in `__all__` are stable.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tandem.clients.async_client import AsyncClient
    from tandem.clients.client import Client
    from tandem.clients.completion import Completion
    from tandem.clients.draft_session import DraftSession
    from tandem.comparison.api import compare
    from tandem.rpc.credentials import Credentials
    from tandem.services.settling import Settled, settle
    from tandem.speculation.errors import TandemError
    from tandem.speculation.types import (
        Chunk,
        FinishReason,
        ModelInfo,
        SamplingParams,
        SpeculationStats,
        Structure,
        StructureKind,
        TokenLogprobs,
    )

__version__ = "0.1.0"

__all__ = [
    "AsyncClient",
    "Chunk",
    "Client",
    "Completion",
    "Credentials",
    "DraftSession",
    "FinishReason",
    "ModelInfo",
    "SamplingParams",
    "Settled",
    "SpeculationStats",
    "Structure",
    "StructureKind",
    "TandemError",
    "TokenLogprobs",
    "compare",
    "settle",
]

_MODULES = {
    **dict.fromkeys(__all__, "tandem.speculation.types"),
    "AsyncClient": "tandem.clients.async_client",
    "Client": "tandem.clients.client",
    "Completion": "tandem.clients.completion",
    "Credentials": "tandem.rpc.credentials",
    "DraftSession": "tandem.clients.draft_session",
    "TandemError": "tandem.speculation.errors",
    "compare": "tandem.comparison.api",
    **dict.fromkeys(("Settled", "settle"), "tandem.services.settling"),
}


def __getattr__(name: str) -> Any:
    """Imports a public name on first use: `import tandem` loads the standard library alone."""
    if name not in _MODULES:
        raise AttributeError(f"module 'tandem' has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
