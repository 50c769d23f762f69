"""What each of two ranks does in tests/runners/test_tensor_parallel.py; torch.distributed.run starts it twice."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tandem.checkpoints.locate import find
from tandem.runners.load_runner import Execution, Shape, load_runner
from tandem.runners.protocol import PrefillRow
from tandem.runners.torch.graph_model import GraphModel
from tandem.runners.torch.graph_runner import GraphRunner
from tandem.runners.torch.graphs import GraphCompiler
from tandem.runners.torch.platforms import CPU
from tandem.runners.torch.tensor_parallel import RankLink, Ranks
from tandem.runners.torch.torch_runner import TorchRunner
from tests.rows import verify_row
from tests.runners.compiled import GREEDY, PROMPT
from tests.runners.graph_check import StrictBackend
from tests.runners.strict import TRAINIUM

SHAPE = Shape(slots=1, max_length=64, max_draft=2, chunk=16)


def logits_and_tokens(runner: TorchRunner) -> tuple[torch.Tensor, list[int]]:
    """Of greedy decoding after PROMPT, with the same drafts every time."""
    for start in range(0, len(PROMPT) - 1, 16):
        runner.prefill([PrefillRow(0, start, PROMPT[:-1][start : start + 16])])
    tokens, first = list(PROMPT), None
    while len(tokens) < 40:
        row = verify_row(0, len(tokens) - 1, tokens[-1], (3, 4), GREEDY)
        if first is None:
            first = runner.verify_logits([row])[:, :3].clone()
        (verdict,) = runner.verify([row])
        tokens += verdict.token_ids  # type: ignore[union-attr]
    assert first is not None
    return first, tokens


def runner(folder: Path, degree: int) -> TorchRunner:
    made = load_runner(find(str(folder)), Execution("cpu", "float32", 1, "off", tp_degree=degree), SHAPE)
    made.warm_up()
    assert isinstance(made, TorchRunner)
    return made


def main(*folders: Path) -> None:
    """Writes the results of each folder's model to a file beside the folder, one for each rank."""
    ranks = Ranks.from_environment(2)
    link = RankLink.join(CPU, ranks)
    groups = [group._get_backend(torch.device("cpu")) for group in (torch.distributed.group.WORLD, link._group)]
    assert [group.options._threads for group in groups] == [1, 1], "two corrupt the heap on a busy host"
    for folder in folders:
        torch.save(made_by(folder), f"{folder}-{ranks.rank}.pt")
    link.part()


def made_by(folder: Path) -> dict[str, Any]:
    eager = runner(folder, 2)
    backend = StrictBackend()
    limits = eager.limits
    model = GraphModel(eager.model.module, limits.slots, limits.max_length, 16, "cpu", platform=TRAINIUM, ranks=2)
    graphs = GraphRunner(model, limits, replace(eager.identity), lambda: GraphCompiler(backend))
    graphs.warm_up()
    return {
        "eager": logits_and_tokens(eager),
        "graphs": logits_and_tokens(graphs),
        "code": [graph.module.code for graph in backend.graphs],
        "exact": eager.shapes.bit_exact,
        "heads": model.buffers[0].shape[0],
    }


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
