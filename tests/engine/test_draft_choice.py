"""What drafts beside a target if that is to be chosen: the shipped head where it was measured to be ahead."""

from __future__ import annotations

import pytest

from tandem.checkpoints.adapter_files import AdapterChoice
from tandem.checkpoints.locate import embedded_draft, embedded_head
from tandem.engine import model_config as module
from tandem.engine.model_config import DraftChoice, ModelConfig, beside_target

OWN = ModelConfig()


@pytest.mark.parametrize(
    ("models", "native", "head", "chosen", "why"),
    [
        (OWN, True, True, "head", "lookup and the shipped EAGLE head"),
        (OWN, False, True, "model", "lookup and the shipped draft model: not in native steps"),
        (OWN, True, False, "model", "lookup and the shipped draft model: the shipped head, which is faster, is not in"),
        (ModelConfig(draft_adapters=(AdapterChoice("sql", "folder"),)), True, True, "model", "--draft_adapters"),
        (ModelConfig(model="another"), True, True, None, "lookup alone, since no draft model"),
    ],
)
def test_the_head_is_chosen_where_it_is_ahead_and_else_the_reason_is_said(
    models: ModelConfig, native: bool, head: bool, chosen: str | None, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not head:
        monkeypatch.setattr(module, "embedded_head", lambda: None)
    found, said = beside_target(models, native)
    assert found.draft_model == {"head": embedded_head(), "model": embedded_draft(), None: None}[chosen]
    assert found.draft == (DraftChoice("hybrid", embedded_head()) if chosen == "head" else models.draft)
    assert why in said


def test_prompts_computed_elsewhere_take_the_draft_model_and_nothing_shipped_lookup(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found, said = beside_target(OWN, native=True, prefill=True)
    assert found.draft_model == embedded_draft() and "--prefill" in said
    monkeypatch.setattr(module, "embedded_head", lambda: None)
    monkeypatch.setattr(module, "embedded_draft", lambda: None)
    found, said = beside_target(OWN, native=True)
    assert found.draft_model is None and said.startswith("lookup alone: the shipped head")
