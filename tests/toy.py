"""A test runner whose pseudo-random logits depend on every cached token."""

from __future__ import annotations

import functools
import json
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tandem.checkpoints.adapter_files import Adapter, AdapterChoice
from tandem.checkpoints.locate import Checkpoint
from tandem.checkpoints.tokenizers import byte_characters
from tandem.checkpoints.tool_prompts import forms
from tandem.runners.backends import Backend, LoadRequest
from tandem.runners.capabilities import PAGE, Capabilities, FeatureRow, FeaturesOut, MemoryOnDemand, Pages
from tandem.runners.protocol import (
    FusedStep,
    Limits,
    PrefillRow,
    Proposal,
    ProposeRow,
    RowFailed,
    Runner,
    RunnerIdentity,
    StepShapes,
    VerifyRow,
    draft_next,
    verdict_or_failure,
    verify_row,
)
from tandem.runners.startup import Startup
from tandem.speculation.stopping import TextStream
from tandem.speculation.types import SparseDistribution, Verdict

VOCAB_SIZE = 258
END = 257
CHUNK = 64  # tokens of a prefill step
LAYERS, HIDDEN = 3, 8  # of the features: digests as numbers that every wire format keeps


@dataclass(frozen=True, slots=True)
class ToyConfig:
    """Parameters of a toy model; models of different `salt` are unrelated."""

    salt: int = 0
    miss: float = 0.0  # share of positions where a draft with the target's salt disagrees
    step_seconds: float = 0.0
    fails: int = 0  # steps before every step raises; 0: never
    head: bool = False  # an EAGLE head (toy_head.py)


def toy_digest(tokens: Sequence[int], before: int = 0) -> int:
    """Hash of `tokens` that follow tokens with digest `before`; determines the logits."""
    return zlib.crc32(np.asarray(tokens, dtype=np.uint32).tobytes(), before)


def toy_logits(tokens: Sequence[int], config: ToyConfig) -> NDArray[np.float32]:
    """Logits [258], float32, after `tokens`: a test's oracle."""
    return digest_logits(toy_digest(tokens), config)


def digest_logits(digest: int, config: ToyConfig) -> NDArray[np.float32]:
    """Logits [258], float32, after the tokens of a digest."""
    return _logits(digest, config).copy()


@functools.lru_cache(4096)  # tests ask the same of every architecture; four megabytes
def _logits(digest: int, config: ToyConfig) -> NDArray[np.float32]:
    random = np.random.Generator(np.random.Philox(key=np.array([digest, config.salt], dtype=np.uint64)))
    logits = random.normal(size=VOCAB_SIZE).astype(np.float32) * 2
    if config.miss and random.random() < config.miss:
        logits = np.roll(logits, 1)
    return logits


def adapted(tokens: Sequence[int], revision: str) -> list[int]:
    """The tokens that a toy caches for rows with an adapter of this revision, for `toy_logits`."""
    salt = zlib.crc32(revision.encode()) % 2**15 + 1
    return [token + (salt << 16) for token in tokens]


def toy_features(digests: NDArray[np.uint32], layers: Sequence[int]) -> NDArray[np.float32]:
    """Features [positions, layers * 8] of digests [positions]: half bytes from -8 to 7, ordered by layer."""
    shifts = np.arange(0, 4 * HIDDEN, 4, dtype=np.uint32)
    each = [(np.roll(shifts, layer)[None] + np.zeros((len(digests), 1), np.uint32)) for layer in layers]
    return ((digests[:, None] >> np.concatenate(each, axis=1)) & 15).astype(np.float32) - 8


def toy_digests(features: NDArray[np.float32], layers: Sequence[int]) -> NDArray[np.uint32]:
    """Digests [positions] of features; 0 where layers contradict each other."""
    halves = (np.rint(features) + 8).astype(np.uint32).reshape(len(features), len(layers), HIDDEN)
    shifts = np.arange(0, 4 * HIDDEN, 4, dtype=np.uint32)
    each = np.stack([(halves[:, i] << np.roll(shifts, n)).sum(axis=-1) for i, n in enumerate(layers)]).astype(np.uint32)
    return np.where((each == each[0]).all(axis=0), each[0], np.uint32(0))


@dataclass(frozen=True, slots=True)
class ToyFeatures:
    """Implements HandedOut with the digests [slots, length] of a toy."""

    digests: NDArray[np.uint32]
    layers: tuple[int, ...]

    def read(self, rows: Sequence[FeatureRow]) -> list[NDArray[np.float32]]:
        return [toy_features(self.digests[r.slot, r.start : r.start + r.count], self.layers) for r in rows]


class ToyRunner:
    """Implements Runner with `toy_logits`. digests [slots, length]: the features, one per position."""

    def __init__(self, limits: Limits, config: ToyConfig | None = None) -> None:
        self.config = config or ToyConfig()
        self.limits = limits
        self.steps = 0
        self.revisions = dict[int, str]()  # of adapters
        self.hands_out = False
        self.digests = np.zeros((limits.slots, limits.max_length + limits.max_draft + limits.chunk), dtype=np.uint32)
        self._cache = np.full((limits.slots, limits.max_length + limits.max_draft + limits.chunk), -1, dtype=np.int64)

    @property
    def identity(self) -> RunnerIdentity:
        return RunnerIdentity("toy", f"toy:{self.config.salt}", "float32", "toy", "toy", (END,))

    @property
    def shapes(self) -> StepShapes:
        return StepShapes(tuple(range(1, self.limits.max_draft + 2)), (self.limits.slots,), bit_exact=True)

    def warm_up(self, startup: Startup | None = None) -> None:
        """Does nothing: there is nothing to compile."""

    @property
    def page_bytes(self) -> int:
        return PAGE * (self._cache.itemsize + self.digests.itemsize)

    def page_store(self, pages: int) -> ToyPages:
        return ToyPages(self._cache, self.digests, pages)

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            pages=Pages(self.page_bytes, "tokens", self.page_store),
            adapters=self.put_adapter,
            memory_on_demand=MemoryOnDemand(0, self.kv_bytes, self.give_back),
            features_out=FeaturesOut(LAYERS, HIDDEN, self.hand_out),
        )

    def hand_out(self, layers: Sequence[int]) -> ToyFeatures:
        self.hands_out = True
        return ToyFeatures(self.digests, tuple(layers))

    def kv_bytes(self, tokens: int) -> int:
        """8 bytes a token, in pages of 16 positions."""
        return self._positions(tokens) * self._cache.itemsize

    def give_back(self, slot: int, tokens: int = 0) -> None:
        self._cache[slot, self._positions(tokens) if tokens else 0 :] = -1

    def taken(self) -> int:
        written = np.pad(self._cache >= 0, ((0, 0), (0, -self._cache.shape[1] % PAGE)))
        return int(written.reshape(len(written), -1, PAGE).any(2).sum()) * PAGE * self._cache.itemsize

    def _positions(self, tokens: int) -> int:
        return -(-(tokens + self.limits.max_draft + 1) // PAGE) * PAGE

    def put_adapter(self, number: int, adapter: Adapter) -> None:
        self.revisions[number] = adapter.revision

    def prefill(self, rows: Sequence[PrefillRow]) -> list[RowFailed | None]:
        self.work()
        for row in rows:
            self._write(row.slot, row.start, self._adapted(row.tokens, row.adapter))
        return [None] * len(rows)

    def verify(self, rows: Sequence[VerifyRow]) -> list[Verdict | RowFailed]:
        self.work()
        return [self.verify_one(row) for row in rows]

    def propose(self, rows: Sequence[ProposeRow]) -> list[Proposal | RowFailed]:
        self.work()
        return [self._propose(row) for row in rows]

    def fused_with(self, draft: Runner) -> FusedStep | None:
        return None

    def verify_one(self, row: VerifyRow) -> Verdict | RowFailed:
        self._write(row.slot, row.position, self._adapted((row.last_token, *row.draft), row.adapter))
        if any(not 0 <= token < 2**32 for token in self._cache[row.slot, : row.position]):
            return RowFailed("a position before the row's was never written, or holds what is no token")
        return verdict_or_failure(lambda: verify_row(row, functools.partial(self._after, row)))

    def _after(self, row: VerifyRow, i: int) -> NDArray[np.float32]:
        return self.logits(row.slot, row.position + i)

    def _propose(self, row: ProposeRow) -> Proposal:
        self._write(row.slot, row.position + 1 - len(row.tail), self._adapted(row.tail, row.adapter))
        proposed: list[int] = []
        distributions: list[SparseDistribution] = []
        most = 1 if row.least == 1 else row.k  # never sure
        for i in range(most):
            if i:
                self._write(row.slot, row.position + i, self._adapted(proposed[-1:], row.adapter))
            logits = self.logits(row.slot, row.position + i)
            token, distribution = draft_next(row, logits, proposed)
            distributions += [distribution] if distribution is not None else []
            proposed.append(token)
        return Proposal(tuple(proposed), distributions=tuple(distributions), doubted=most < row.k)

    def _adapted(self, tokens: Sequence[int], adapter: int) -> Sequence[int]:
        return adapted(tokens, self.revisions[adapter]) if adapter else tokens

    def logits(self, slot: int, position: int) -> NDArray[np.float32]:
        """Logits [vocabulary] after `position` of a slot."""
        return toy_logits(self._cache[slot, : position + 1].tolist(), self.config)

    def _write(self, slot: int, start: int, tokens: Sequence[int]) -> None:
        self._cache[slot, start : start + len(tokens)] = tokens
        digest = int(self.digests[slot, start - 1]) if start else 0
        for position, token in enumerate(tokens, start):
            self.digests[slot, position] = digest = toy_digest((token,), digest)

    def work(self) -> None:
        """Simulates a step: counts it, takes its time, fails if configured."""
        self.steps += 1
        if 0 < self.config.fails < self.steps:
            raise RuntimeError(f"toy device gone after {self.config.fails} steps")
        if self.config.step_seconds:
            time.sleep(self.config.step_seconds)


class ToyPages:
    """Implements PageStore: tokens and their digests, which a head reads."""

    def __init__(self, cache: NDArray[np.int64], digests: NDArray[np.uint32], pages: int) -> None:
        self._cache, self._memory = cache, np.zeros((pages, PAGE), dtype=np.int64)
        self._digests, self._features = digests, np.zeros((pages, PAGE), dtype=np.uint32)

    def save(self, slot: int, first: int, pages: Sequence[int]) -> None:
        start, end = first * PAGE, (first + len(pages)) * PAGE
        self._memory[list(pages)] = self._cache[slot, start:end].reshape(-1, PAGE)
        self._features[list(pages)] = self._digests[slot, start:end].reshape(-1, PAGE)

    def load(self, slot: int, first: int, pages: Sequence[int]) -> None:
        start, end = first * PAGE, (first + len(pages)) * PAGE
        self._cache[slot, start:end] = self._memory[list(pages)].reshape(-1)
        self._digests[slot, start:end] = self._features[list(pages)].reshape(-1)

    def read(self, page: int) -> bytes:
        return self._memory[page].tobytes() + self._features[page].tobytes()

    def write(self, page: int, data: bytes) -> None:
        tokens = self._memory[page].nbytes
        self._memory[page] = np.frombuffer(data[:tokens], dtype=np.int64)
        self._features[page] = np.frombuffer(data[tokens:], dtype=np.uint32)


class ToyTokenizer:
    """Maps text to its UTF-8 bytes."""

    sha256: str = "toy"
    vocab_size: int = VOCAB_SIZE
    end_of_sequence_ids: tuple[int, ...] = (END,)

    def encode(self, text: str, chat: bool) -> list[int]:
        return list(text.encode())

    def tokens(self, text: str, special: bool) -> list[int]:
        return list(text.encode())

    def render(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        said = {name: value for name, value in options.items() if value and name != "add_generation_prompt"}
        as_text = (form for form, _ in forms("", messages, None) if not any("tool_calls" in each for each in form))
        messages = next(as_text)
        return "".join(each["content"] for each in messages) + (json.dumps(said) if said else "")

    def tool_format(self) -> str:
        return "hermes"

    def text(self, tokens: Sequence[int]) -> str:
        return bytes(each for each in tokens if each < 256).decode("latin-1")

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) if token < 256 else b""

    def stream(self) -> ToyText:
        return ToyText()

    def files(self) -> dict[str, bytes]:
        """A byte-level vocabulary without merges; reads UTF-8, while `stream` shows each byte."""
        special = [{"id": i, "content": text, "special": True, **_PLAIN} for i, text in ((256, "<s>"), (END, "</s>"))]
        byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
        vocabulary = {character: byte for byte, character in enumerate(byte_characters())}
        tokenizer = {
            "version": "1.0",
            "added_tokens": special,
            "pre_tokenizer": byte_level,
            "decoder": byte_level,
            "model": {"type": "BPE", "vocab": vocabulary | {"<s>": 256, "</s>": END}, "merges": []},
        }
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "chat_template": _CHAT}
        return {
            "tokenizer.json": json.dumps(tokenizer).encode(),
            "tokenizer_config.json": json.dumps(settings).encode(),
        }

    def spelling(self) -> list[bytes]:
        """The bytes of each token; none for begin and end of sequence."""
        return [*(bytes([byte]) for byte in range(256)), b"", b""]


_PLAIN = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
_CHAT = "{% for message in messages %}{{ message.content }}{% endfor %}"


class ToyText(TextStream):
    """Decodes each byte as one Latin-1 character."""

    def push(self, token: int) -> str:
        return bytes([token]).decode("latin-1") if token < 256 else ""


class ToyBackend(Backend):
    """Makes toy runners; parameters name a model: "miss=0.3,step=0.01,salt=1,fails=100" or "head"."""

    def find(self, model: str | None) -> Checkpoint:
        return Checkpoint(model or "", "toy")

    def adapter(self, choice: AdapterChoice) -> Adapter:
        """A toy adapter without weights; its source is its revision and changes the tokens of rows."""
        return Adapter(choice.name, f"toy:{choice.source}")

    def tokenizer(self, checkpoint: Checkpoint) -> ToyTokenizer:
        return ToyTokenizer()

    def load(self, checkpoint: Checkpoint, request: LoadRequest, startup: Startup) -> Runner:
        shape = request.shape
        limits = Limits(shape.slots, shape.max_length, shape.max_draft, CHUNK, VOCAB_SIZE)
        return toy_runner(limits, toy_config(checkpoint.name))

    def is_head(self, checkpoint: Checkpoint) -> bool:
        return toy_config(checkpoint.name).head

    def load_head(
        self, checkpoint: Checkpoint, target: Runner | Checkpoint, request: LoadRequest, startup: Startup
    ) -> Runner:
        from tests.toy_head import ToyHead

        if isinstance(target, ToyRunner):
            return ToyHead(target.limits, toy_config(checkpoint.name), target)
        shape = request.shape
        limits = Limits(shape.slots, shape.max_length, shape.max_draft, CHUNK, VOCAB_SIZE)
        return ToyHead(limits, toy_config(checkpoint.name))


def toy_runner(limits: Limits, config: ToyConfig) -> ToyRunner:
    """Makes a runner; tests replace this function."""
    return ToyRunner(limits, config)


def toy_config(model: str) -> ToyConfig:
    """Parses a toy model's name. Raises ValueError."""
    values = dict(part.partition("=")[::2] for part in model.split(",") if part)
    try:
        config = ToyConfig(
            int(values.pop("salt", 0)),
            float(values.pop("miss", 0)),
            float(values.pop("step", 0)),
            int(values.pop("fails", 0)),
            values.pop("head", None) is not None,
        )
    except ValueError:
        values["unreadable"] = ""
    if values:
        raise ValueError(f"model: {model!r} is not a toy model; for example: miss=0.3,step=0.01,salt=1")
    return config


BACKEND = ToyBackend()
