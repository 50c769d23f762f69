"""The DraftWorkers, and which one drafts for a row."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from tandem.rpc.propose_stream import DraftClient, TokenizerMismatch
from tandem.rpc.received_errors import TandemError
from tandem.speculation.types import ModelInfo
from tandem.vllm.drafter_settings import Settings

log = logging.getLogger("tandem.vllm")

PADDING = 512  # smaller differences may be padding: 151,936 and 152,064
PATIENCE = 3  # late steps in a row before steps stop waiting


class RowWorker(DraftClient):
    """One DraftWorker. Except `patient` only for the event loop."""

    def __init__(self, address: str, target: ModelInfo, settings: Settings) -> None:
        super().__init__(address, target.tokenizer_sha256, settings.answer_seconds, settings.credentials)
        self.target, self.sessions = target, 0
        self._late_steps, self._last_late = 0, -1

    def _difference(self, info: ModelInfo) -> str:
        # Unknown tokenizers: sizes decide. Drafts of another tokenizer are not accepted and change no token.
        if self.tokenizer_sha256:
            return super()._difference(info)
        ours, theirs = self.target.vocab_size, info.vocab_size
        sizes = f"has a vocabulary of {theirs} tokens, and vLLM's model one of {ours}"
        return f"the draft worker at {self.address} {sizes}" if abs(theirs - ours) >= PADDING else ""

    @property
    def patient(self) -> bool:
        return self.health.up and self._late_steps < PATIENCE

    def answered(self, in_time: bool, step: int) -> None:
        """Records whether a draft was in time; late drafts of one step count once."""
        if in_time:
            self._late_steps = 0
        elif step != self._last_late:
            self._late_steps, self._last_late = self._late_steps + 1, step

    async def try_again(self) -> None:
        if self.health.up or not self.health.attempt():
            return
        self.forget()
        try:
            await self.info(self.seconds, wait=False)
            self.health.succeeded()
        except (TandemError, TokenizerMismatch) as error:
            self.health.failed(error)
        finally:
            self.health.ended()


class RowWorkers:
    """Rows keep their worker while it is well."""

    def __init__(self, workers: Sequence[RowWorker]) -> None:
        self.all = tuple(workers)

    def for_row(self, own: RowWorker | None) -> RowWorker:
        """Returns `own` if it is up, else another worker."""
        if own is not None and own.health.up:
            return own
        up = [worker for worker in self.all if worker.health.up]
        if up:
            return min(up, key=lambda worker: worker.sessions)
        return own or self.all[0]

    def states(self) -> list[tuple[str, dict[str, float]]]:
        return [
            (each.address, {"failures": each.health.failures, "up": each.health.up, "sessions": each.sessions})
            for each in self.all
        ]


def target_of(vllm_config: Any, tokenizer_sha256: str | None) -> ModelInfo:
    """Reads vLLM's configuration. `tokenizer_sha256` None: from local files; the result has "" if it is unknown."""
    model, drafts = vllm_config.model_config, vllm_config.speculative_config
    if tokenizer_sha256 is None:
        tokenizer_sha256 = _fingerprint(str(getattr(model, "tokenizer", None) or model.model))
    sizes = int(model.get_vocab_size()), int(model.max_model_len), int(drafts.num_speculative_tokens)
    return ModelInfo(str(model.model), "", tokenizer_sha256, *sizes, kv_slots=0, dtype="", device="", backend="vllm")


def _fingerprint(name: str) -> str:
    try:
        from tandem.checkpoints.locate import find
        from tandem.checkpoints.tokenizers import HuggingFaceTokenizer

        return HuggingFaceTokenizer(find(name)).sha256
    except Exception as error:  # not found, or in a form that only vLLM reads: sizes are compared instead
        log.info("the tokenizer of %s is not compared with the workers', only its size: %s", name, error)
        return ""
