"""A receipt's data and JSON, parsed within bounds."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields

from tandem.checkpoints.json_files import parsed
from tandem.receipts.canonical import canonical
from tandem.receipts.schema import Json, check_document
from tandem.speculation.errors import InvalidField
from tandem.speculation.types import FinishReason, ModelInfo, SamplingParams, Structure, StructureKind, TokenLogprobs

VERSION, CONTRACT = 1, "tandem.v1"
MOST_BYTES, MOST_VALUES = 16 * 2**20, 2**21  # values are counted before parsing: the smallest take 60 bytes
SIGNED = b"tandem-receipt-v1\n"  # signed prefix: a signature means nothing elsewhere


@dataclass(frozen=True, slots=True)
class SignedModel:
    """Equal models have equal weights, number format and tokenizer."""

    name: str
    weights_revision: str
    dtype: str
    tokenizer_sha256: str
    vocab_size: int

    @classmethod
    def from_info(cls, info: ModelInfo) -> SignedModel:
        return cls(**{each.name: getattr(info, _INFO.get(each.name, each.name)) for each in fields(cls)})


_INFO = {"name": "model_name"}


@dataclass(frozen=True, slots=True)
class SignedRequest:
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
    """The signed part. `adapter`: name and revision. `digests`: see `prefix_digests`."""

    model: SignedModel
    adapter: tuple[str, str] | None
    request: SignedRequest
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
        request, sampling = self.request, asdict(self.request.sampling)
        logprobs = [{"logprob": each.logprob, "top": [list(one) for one in each.top]} for each in self.logprobs]
        structure = self.request.sampling.structure
        sampling |= {"seed": str(sampling["seed"]), "logit_bias": [list(each) for each in sampling["logit_bias"]]}
        sampling["structure"] = structure and {"kind": structure.kind.value, "text": structure.text}
        return {
            "version": VERSION,
            "contract": CONTRACT,
            "model": asdict(self.model),
            "adapter": self.adapter and {"name": self.adapter[0], "revision": self.adapter[1]},
            "request": {
                **{each.name: getattr(request, each.name) for each in fields(SignedRequest)},
                "sampling": sampling,
            },
            "prompt": {"tokens": self.prompt_tokens, "digest": self.prompt_digest.hex()},
            "output": {
                "token_ids": list(self.token_ids),
                "finish_reason": self.finish_reason.name.lower(),
                "digests": [each.hex() for each in self.digests],
                "logprobs": None if request.logprobs is None else logprobs,
            },
            "served": asdict(self.served),
            "key": self.key,
        }

    @property
    def signed(self) -> bytes:
        return SIGNED + canonical(self.json)


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
    check_document(data)
    return Signed(_receipt(data["receipt"]), bytes.fromhex(data["signature"]), bytes.fromhex(data["salt"]))


def _receipt(data: Json) -> Receipt:
    # Checked against the schema.
    request, output, served = _request(data["request"]), data["output"], dict(data["served"])
    model, tokens = SignedModel(**data["model"]), tuple(output["token_ids"])
    served["verifiers"] = tuple(VerifiedAt(**each) for each in served["verifiers"])
    if (output["logprobs"] is None) != (request.logprobs is None):
        raise InvalidField("logprobs", "not those that the request asks for")
    logprobs = tuple(TokenLogprobs(float(each["logprob"]), _pairs(each["top"])) for each in output["logprobs"] or ())
    top = (token for each in logprobs for token, _ in each.top)
    for name, ids in (("token_ids", tokens), ("top", top)):
        if max(ids, default=0) >= model.vocab_size:
            raise InvalidField(name, f"an id is outside the vocabulary of {model.vocab_size}")
    if output["logprobs"] is not None and len(logprobs) != len(tokens):
        raise InvalidField("logprobs", f"{len(logprobs)} for {len(tokens)} tokens")
    return Receipt(
        model,
        data["adapter"] and (data["adapter"]["name"], data["adapter"]["revision"]),
        request,
        data["prompt"]["tokens"],
        bytes.fromhex(data["prompt"]["digest"]),
        tokens,
        FinishReason[output["finish_reason"].upper()],
        tuple(map(bytes.fromhex, output["digests"])),
        logprobs,
        Served(**served),
        data["key"],
    )


def _request(data: Json) -> SignedRequest:
    sampling, structure = dict(data["sampling"]), data["sampling"]["structure"]
    sampling |= {name: float(value) for name, value in sampling.items() if type(value) is int and name != "top_k"}
    sampling |= {"seed": int(sampling["seed"]), "logit_bias": _pairs(sampling["logit_bias"])}
    sampling["structure"] = structure and Structure(StructureKind(structure["kind"]), structure["text"])
    lists = {name: tuple(data[name]) for name in ("end_of_sequence_ids", "stop_token_ids", "stop_strings")}
    return SignedRequest(**{**data, **lists, "sampling": SamplingParams(**sampling)})


def _pairs(values: Sequence[Sequence[float]]) -> tuple[tuple[int, float], ...]:
    return tuple((int(token), float(number)) for token, number in values)


EVERY = 64  # output tokens between digests; a span, which one step redraws
SALT_BYTES = 32
_PROMPT = b"tandem-receipt-prompt-v1\0"


def prompt_digest(salt: bytes, prompt: Sequence[int]) -> bytes:
    """Returns SHA-256 of label, salt and ids (little-endian uint32); without the salt nobody can guess prompts."""
    return hashlib.sha256(_PROMPT + salt + struct.pack(f"<{len(prompt)}I", *prompt)).digest()


def prefix_digests(prompt: bytes, tokens: Sequence[int]) -> tuple[bytes, ...]:
    """Chains SHA-256(digest, token as 4 bytes) from the prompt's; returns every EVERYth and the last."""
    found, digest = [], prompt
    for count, token in enumerate(tokens, 1):
        digest = hashlib.sha256(digest + struct.pack("<I", token)).digest()
        if count % EVERY == 0 or count == len(tokens):
            found.append(digest)
    return tuple(found)
