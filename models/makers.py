"""Which maker of graphs a device gets."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Sequence

from models.gguf_cache import cache_root
from models.graphs import Captured, Compiled, Maker
from models.runner import Identity, Limits


def makers(identity: Identity, limits: Limits, only: Sequence[int] | None) -> Callable[[str], Maker]:
    """`makers(what)` makes graphs of this model for `what`: CUDA graphs, or packages kept on disk for the CPU."""
    if identity.device == "cuda":
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_root() / "inductor"))  # kernels kept on disk
        return lambda what: Captured(Compiled())

    def packages(what: str) -> Maker:
        from models.artifacts import Packages, package_folder

        facts = {
            "what": what,
            "weights": identity.weights_revision,
            "dtype": identity.dtype,
            "limits": dataclasses.asdict(limits),
            "only": only,
        }
        return Packages(package_folder(re.sub(r"[^\w.-]+", "-", identity.model_name), facts))

    return packages
