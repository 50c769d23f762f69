"""Which compiler of graphs a device gets."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence

from tandem.runners.protocol import Identity, Limits
from tandem.runners.torch.graphs import CudaGraphCompiler, GraphCompiler, TorchCompiler
from tandem.runners.torch.platforms import Platform


def graph_compiler(
    platform: Platform, identity: Identity, limits: Limits, only: Sequence[int] | None, folder: str | None = None
) -> Callable[[str], GraphCompiler]:
    """`graph_compiler(what)` makes graphs of this model for `what`, as the platform does.

    "packages": compiled ahead and kept on disk. "captured": CUDA graphs of compiled steps. "compiled": as the backend
    makes them. The latter two keep code in the folder that Platform.prepare named.
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
