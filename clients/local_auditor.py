"""Audits a remote target's rounds with a model in this process."""

from __future__ import annotations

from collections.abc import Sequence

from tandem.clients.auditing import Auditor
from tandem.engine.batcher import Batcher
from tandem.engine.generators import target_info
from tandem.engine.loading import Loaded, load
from tandem.engine.model_config import ModelConfig
from tandem.engine.sequences import LocalVerifier
from tandem.runners.loading import Execution, Shape
from tandem.speculation.types import ModelInfo, Request, Verdict


class LocalTarget:
    """Audits with a model in this process."""

    def __init__(self, loaded: Loaded, batcher: Batcher) -> None:
        self._loaded, self._batcher = loaded, batcher
        self.info = target_info(loaded, 0)

    @classmethod
    async def loaded(cls, model: str, target: ModelInfo) -> LocalTarget:
        """Loads the model with the sizes and in the number format of `target`. Raises ValueError."""
        batcher = Batcher("tandem-audit")
        weights, _, dtype = target.dtype.rpartition("/")
        toy = target.backend == "toy"
        kinds = Execution() if toy else Execution(dtype=dtype, weights=_weights(weights), recertify=False)
        shape = Shape(1, target.max_sequence_length, max(1, target.max_speculation_length))
        config = ModelConfig(execution=kinds, shape=shape, model=model, backend="toy" if toy else "torch")
        try:
            return cls(await load(config, batcher), batcher)
        except BaseException:
            await batcher.close()
            raise

    def begin(self, request: Request, prompt: Sequence[int]) -> Auditor:
        return _LocalAuditor(LocalVerifier(self._loaded.engine, request), tuple(prompt))

    async def close(self) -> None:
        await self._batcher.close()


def _weights(name: str) -> str:
    return "auto" if not name else name if name in ("int8", "q4") else "as-stored"


class _LocalAuditor:
    def __init__(self, verifier: LocalVerifier, prompt: Sequence[int]) -> None:
        self._verifier, self._prompt = verifier, prompt

    async def verify(self, tokens: Sequence[int], draft: Sequence[int]) -> Verdict:
        await self._verifier.open(self._prompt)
        return await self._verifier.verify(tokens, draft)

    async def close(self) -> None:
        await self._verifier.close()
