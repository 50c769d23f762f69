"""Queries of docs/observability.md and of the dashboard name metrics that exist."""

from __future__ import annotations

import json
import re
import time

from tandem.engine.batcher import Batcher
from tandem.engine.engine import Engine
from tandem.engine.prefill import PageCopies, PrefillPages, RemotePrefill
from tandem.engine.prefix_cache import PrefixCache
from tandem.engine.slots import KVMemory
from tandem.engine.structures import Structures
from tandem.services.observability.metrics import Metrics
from tandem.services.sessions.table import SessionTable
from tandem.services.shutdown import Lifecycle
from tandem.speculation.fallible import DrafterHealth
from tandem.speculation.types import Rehearsal
from tests.support import REPOSITORY, run, toy

NAME = r"(?:vllm|tandem):[a-z0-9_]+"
PAGE = (REPOSITORY / "docs" / "observability.md").read_text(encoding="utf-8")


def exported() -> dict[str, str]:
    """Names of a server that has everything, as they are written in a query, and their types."""
    rehearsal = Rehearsal("target", "a name", "a device", "a test")
    metrics, table = Metrics("target", "toy", 5, {}, [rehearsal]), SessionTable(time.monotonic, 1.0)
    batcher, runner = Batcher("test"), toy()
    engine = Engine(runner, batcher, structures=Structures(None, 1))
    engine.slots.memory = KVMemory(1, 1, int, lambda slot, tokens: None)
    engine.prefixes = PrefixCache(runner, runner.page_store(1), 1)
    copies = run(PageCopies.of(runner, batcher))
    engine.remote_prefill = RemotePrefill(engine, None, copies)  # type: ignore[arg-type]
    metrics.watch_steps(batcher)
    metrics.states.watch_requests(Lifecycle(), [table], [engine.slots])
    metrics.states.watch_engines({"target": engine})
    for kind, part in (("drafter", DrafterHealth("")), ("prefill pages", PrefillPages(engine, copies))):
        metrics.states.watch(kind, part)
    metrics.states.watch("sessions", table, {"kind": "verify"})
    metrics.started({"total": 1.0})
    run(batcher.close())
    families = list(metrics.registry.collect())
    return {f"{f.name}_total" if f.type == "counter" else f.name: f.type for f in families}


def queried(text: str) -> set[str]:
    return {re.sub(r"_(bucket|sum|count)$", "", name) for name in re.findall(NAME, text)}


def test_every_metric_of_the_page_and_of_the_dashboard_exists() -> None:
    blocks = "\n".join(re.findall(r"```text\n(.*?)```", PAGE, flags=re.DOTALL))
    asked = {name for name in queried(blocks) if not name.endswith("_created")}
    assert len(asked) > 8 and asked <= set(exported())
    board = json.loads((REPOSITORY / "deploy" / "grafana" / "tandem.json").read_text(encoding="utf-8"))
    expressions = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    names = queried("\n".join([*expressions, board["templating"]["list"][1]["query"]["query"]]))
    assert len(expressions) > 30 and names <= set(exported())
    # Every speculation metric of vLLM's is shown, and every state of ours.
    assert {name for name, kind in exported().items() if kind == "gauge"} <= names
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
