"""A receipt's data and JSON, parsed within bounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields

from tandem.checkpoints.json_files import parsed
from tandem.receipts.canonical import canonical
from tandem.receipts.digests import prefix_digests, prompt_digest
from tandem.receipts.reading import Json, Reader
from tandem.speculation.errors import InvalidField
from tandem.speculation.types import (
    FinishReason,
    ModelInfo,
    SamplingParams,
    Structure,
    StructureKind,
    TokenLogprobs,
)

VERSION, CONTRACT = 1, "tandem.v1"
MOST_BYTES, MOST_VALUES = 16 * 2**20, 2**21  # values are counted before parsing: the smallest take 60 bytes
MOST_STOPS = 1024
SIGNED = b"tandem-receipt-v1\n"  # signed prefix: a signature means nothing elsewhere


@dataclass(frozen=True, slots=True)
class Model:
    """Equal models have equal weights, number format and tokenizer."""

    name: str
    weights_revision: str
    dtype: str
    tokenizer_sha256: str
    vocab_size: int

    @classmethod
    def of(cls, info: ModelInfo) -> Model:
        return cls(**{each.name: getattr(info, _INFO.get(each.name, each.name)) for each in fields(cls)})


_INFO = {"name": "model_name"}
_MODEL_TEXTS = ("name", "weights_revision", "dtype", "tokenizer_sha256")


@dataclass(frozen=True, slots=True)
class Asked:
    """Request fields that affect tokens or their end, defaults filled in."""

    sampling: SamplingParams
    max_new_tokens: int
    rule: str = "agreement"
    end_of_sequence_ids: tuple[int, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class VerifiedAt:
    """A remote verifier: its receipt key, "" if unsigned, and arithmetic."""

    key: str
    arithmetic: str


@dataclass(frozen=True, slots=True)
class Served:
    """`arithmetic`: what bits depend on besides weights and format; empty: unknown."""

    service: str
    tandem: str
    time: str
    processor: str
    backend: str
    device: str
    arithmetic: str
    bit_exact: bool
    drafts: str
    rounds: int
    drafted_by: Mapping[str, int] = field(default_factory=dict)
    accepted_by: Mapping[str, int] = field(default_factory=dict)
    verifiers: tuple[VerifiedAt, ...] = ()


@dataclass(frozen=True, slots=True)
class Receipt:
    """The signed part. `adapter`: name and revision. `digests`: see digests.py."""

    model: Model
    adapter: tuple[str, str] | None
    asked: Asked
    prompt_tokens: int
    prompt_digest: bytes
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    digests: tuple[bytes, ...]
    logprobs: tuple[TokenLogprobs, ...]
    served: Served
    key: str

    def chained(self) -> bool:
        return self.digests == prefix_digests(self.prompt_digest, self.token_ids)

    def of_prompt(self, salt: bytes, prompt: Sequence[int]) -> bool:
        return len(prompt) == self.prompt_tokens and prompt_digest(salt, prompt) == self.prompt_digest

    @property
    def json(self) -> Json:
        asked, sampling = self.asked, asdict(self.asked.sampling)
        logprobs = [{"logprob": each.logprob, "top": [list(one) for one in each.top]} for each in self.logprobs]
        structure = self.asked.sampling.structure
        sampling |= {"seed": str(sampling["seed"]), "logit_bias": [list(each) for each in sampling["logit_bias"]]}
        sampling["structure"] = structure and {"kind": structure.kind.value, "text": structure.text}
        return {
            "version": VERSION,
            "contract": CONTRACT,
            "model": asdict(self.model),
            "adapter": self.adapter and {"name": self.adapter[0], "revision": self.adapter[1]},
            "request": {**{each.name: getattr(asked, each.name) for each in fields(Asked)}, "sampling": sampling},
            "prompt": {"tokens": self.prompt_tokens, "digest": self.prompt_digest.hex()},
            "output": {
                "token_ids": list(self.token_ids),
                "finish_reason": self.finish_reason.name.lower(),
                "digests": [each.hex() for each in self.digests],
                "logprobs": None if asked.logprobs is None else logprobs,
            },
            "served": asdict(self.served),
            "key": self.key,
        }

    @property
    def signed(self) -> bytes:
        return SIGNED + canonical(self.json)

    @property
    def answer(self) -> bytes:
        """Returns what all receipts of a request share: without server and salt."""
        said = self.json
        del said["served"], said["key"], said["prompt"]["digest"], said["output"]["digests"]
        return canonical(said)


@dataclass(frozen=True, slots=True)
class Signed:
    """A receipt with signature and salt."""

    receipt: Receipt
    signature: bytes
    salt: bytes

    @property
    def text(self) -> str:
        document = {"receipt": self.receipt.json, "salt": self.salt.hex(), "signature": self.signature.hex()}
        return canonical(document).decode()


def read_signed(text: str) -> Signed:
    """Parses a document. Raises InvalidField, also for unknown fields."""
    if len(text) > MOST_BYTES:
        raise InvalidField("receipt", f"{len(text)} bytes are above the limit of {MOST_BYTES}")
    if (values := sum(map(text.count, "[{,"))) > MOST_VALUES:
        raise InvalidField("receipt", f"{values} values are above the limit of {MOST_VALUES}")
    try:
        data = parsed(text)
    except ValueError as error:
        raise InvalidField("receipt", f"not JSON: {error}") from None
    document = Reader("receipt", data)
    document.only("receipt", "salt", "signature")
    signature, salt = document.hex("signature", 64), document.hex("salt", 32)
    return Signed(_receipt(document.inner("receipt")), signature, salt)


def _receipt(read: Reader) -> Receipt:
    of = ("version", "contract", "model", "adapter", "request", "prompt", "output", "served", "key")
    read.only(*of)
    if (version := read.integer("version")) != VERSION:
        raise InvalidField("version", f"{version} is not {VERSION}, the one that this program checks")
    if (contract := read.text("contract")) != CONTRACT:
        raise InvalidField("contract", f"{contract!r} is not {CONTRACT}")
    model = read.inner("model")
    model.only(*(each.name for each in fields(Model)))
    vocab_size = model.integer("vocab_size", 1)
    output, prompt = read.inner("output"), read.inner("prompt")
    output.only("token_ids", "finish_reason", "digests", "logprobs")
    prompt.only("tokens", "digest")
    asked = _asked(read.inner("request"))
    tokens = output.integers("token_ids", vocab_size)
    if not tokens:
        raise InvalidField("token_ids", "empty")
    reasons = {each.name.lower(): each for each in FinishReason}
    return Receipt(
        Model(**{name: model.name(name) for name in _MODEL_TEXTS}, vocab_size=vocab_size),
        _adapter(read),
        asked,
        prompt.integer("tokens", 1),
        prompt.hex("digest", 32),
        tokens,
        reasons[output.one_of("finish_reason", tuple(reasons))],
        output.hexes("digests", 32),
        _logprobs(output, len(tokens), vocab_size) if asked.logprobs is not None else output.absent("logprobs"),
        _served(read.inner("served")),
        read.name("key"),
    )


def _adapter(read: Reader) -> tuple[str, str] | None:
    if read.value("adapter") is None:
        return None
    adapter = read.inner("adapter")
    adapter.only("name", "revision")
    return adapter.name("name"), adapter.name("revision")


def _asked(read: Reader) -> Asked:
    read.only(*(each.name for each in fields(Asked)))
    stop_strings = read.texts("stop_strings")
    if "" in stop_strings or len(stop_strings) > MOST_STOPS:
        raise InvalidField("stop_strings", f"one is empty, or more than {MOST_STOPS}")
    sampling = read.inner("sampling")
    sampling.only(*(each.name for each in fields(SamplingParams)))
    seed = sampling.text("seed")
    if not (seed.isascii() and seed.isdecimal() and len(seed) <= 20):
        raise InvalidField("seed", "not the digits of an integer")
    structure = None
    if sampling.value("structure") is not None:
        of = sampling.inner("structure")
        of.only("kind", "text")
        structure = Structure(StructureKind(of.one_of("kind", [each.value for each in StructureKind])), of.text("text"))
    reals = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
    logprobs = read.value("logprobs")
    return Asked(
        SamplingParams(
            **{name: sampling.real(name) for name in reals},
            top_k=sampling.integer("top_k"),
            seed=int(seed),
            logit_bias=sampling.pairs("logit_bias"),
            structure=structure,
        ),
        read.integer("max_new_tokens", 1),
        read.one_of("rule", ("agreement",)),
        read.integers("end_of_sequence_ids"),
        read.integers("stop_token_ids"),
        stop_strings,
        None if logprobs is None else read.integer("logprobs", 0, 20),
    )


def _logprobs(read: Reader, count: int, vocab_size: int) -> tuple[TokenLogprobs, ...]:
    found = []
    for each in read.each("logprobs"):
        each.only("logprob", "top")
        found.append(TokenLogprobs(each.real("logprob"), each.pairs("top", vocab_size)))
    if len(found) != count:
        raise InvalidField("logprobs", f"{len(found)} for {count} tokens")
    return tuple(found)


def _served(read: Reader) -> Served:
    read.only(*(each.name for each in fields(Served)))
    texts = ("service", "tandem", "time", "processor", "backend", "device", "arithmetic", "drafts")
    verifiers = []
    for each in read.each("verifiers"):
        each.only("key", "arithmetic")
        verifiers.append(VerifiedAt(each.name("key"), each.name("arithmetic")))
    return Served(
        **{name: read.name(name) for name in texts},
        bit_exact=read.boolean("bit_exact"),
        rounds=read.integer("rounds"),
        drafted_by=read.counts("drafted_by"),
        accepted_by=read.counts("accepted_by"),
        verifiers=tuple(verifiers),
    )
