"""Selects a platform's graph compiler."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence

from tandem.runners.protocol import Limits, RunnerIdentity
from tandem.runners.torch.graphs import CudaGraphCompiler, GraphCompiler, TorchCompiler
from tandem.runners.torch.platforms import Platform


def graph_compiler(
    platform: Platform, identity: RunnerIdentity, limits: Limits, only: Sequence[int] | None, folder: str | None = None
) -> Callable[[str], GraphCompiler]:
    """Returns a function from a purpose ("target", "draft", ...) to the compiler of this model's graphs for it.

    By `platform.graphs`: "packages" are compiled ahead of time and kept on disk in `folder`, "captured" are CUDA graphs
    of compiled steps, "compiled" is torch.compile alone. The latter two keep code in the folder that Platform.prepare
    set.
    """
    if platform.graphs == "captured":
        return lambda what: CudaGraphCompiler(TorchCompiler(platform.backend, platform.options))
    if platform.graphs == "compiled":
        return lambda what: TorchCompiler(platform.backend, platform.options)

    def packages(what: str) -> GraphCompiler:
        from tandem.runners.torch.artifacts import PackageCompiler, package_folder

        facts = {
            "what": what,
            "weights": identity.weights_revision,
            "dtype": identity.dtype,
            "limits": dataclasses.asdict(limits),
            "only": only,
        }
        name, root = re.sub(r"[^\w.-]+", "-", identity.model_name), platform.kept(folder)
        return PackageCompiler(package_folder(root, name, facts, keeps=folder is not None))

    return packages
