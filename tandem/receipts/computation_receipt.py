"""Computation Receipts (CR v0.1, anomly-labs/computation-receipts): a receipt in that format, and its sample of spans.

docs/receipts.md has the profile. Float32 sums depend on their order, so CR's own verdict is UNVERIFIABLE.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Mapping, Sequence
from itertools import count, islice

from tandem.receipts.canonical import canonical
from tandem.receipts.receipt import EVERY, Receipt, Signed
from tandem.receipts.schema import Json

PADDING = 2**32 - 1  # behind the last token, since a tensor's rows are equally long
NATIVE: Json = {"group": 32, "group_sum_bits": 32, "sum_bits": 32, "fused_multiply_add": 1}
"""Integer sums of 32 products, scaled and added in float32 in the order of inputs, with one rounding each."""


def computation_receipt(signed: Signed, size: int | None = None, challenge: bytes = b"") -> Json:
    """Returns a CR 0.1 document, or 0.1.1 with a sample of `size` spans, at most all."""
    found = manifest(signed.receipt)
    if size is not None:
        rows, base = _rows(signed.receipt.token_ids), {**found, "cr": "0.1.1"}
        size = min(size, len(rows))
        sampled = [rows[index] for index in indices(base, len(rows), size, challenge)]
        found = {
            **base,
            "sample": {
                "rule": "sha256-ctr-reject-v1",
                "n_units": len(rows),
                "size": size,
                "challenge": challenge.hex(),
                "digest": _tensor("u4", [size, EVERY], b"".join(sampled)),
            },
        }
    return {"manifest": found, "certificate": _digest(canonical(found)), "meta": {"tandem": signed.text}}


def manifest(receipt: Receipt) -> Json:
    whole, rows = receipt.json, _rows(receipt.token_ids)
    model = {name: str(value).encode() for name, value in whole["model"].items() if name != "name"}
    adapter = {"adapter": canonical(whole["adapter"])} if receipt.adapter else {}
    inputs = {"prompt": receipt.prompt_digest, "request": canonical(whole["request"])}
    return {
        "cr": "0.1",
        "digest_alg": "sha256",
        "arithmetic": _arithmetic(receipt),
        "computation": {"id": whole["contract"], "version": str(whole["version"])},
        "model": _collection(model | adapter),
        "input": _collection(inputs),
        "output": {"digest": _tensor("u4", [len(rows), EVERY], b"".join(rows)), "shape": [len(rows), EVERY]},
    }


def _arithmetic(receipt: Receipt) -> Json:
    served = receipt.served
    blocks, _, dtype = receipt.model.dtype.rpartition("/")
    native = served.backend == "native" and dtype == "float32"
    name = "tandem-native-f32" if native else f"tandem:{served.arithmetic or 'unknown'}"
    params = NATIVE | {"kv_bits": 16 if blocks else 32} if native else {}
    return {"profile": name, "accumulation": "rounded", "order_independent": False, "params": params}


def sampled_spans(receipt: Receipt, size: int, challenge: bytes) -> list[int]:
    """Returns the spans of 64 tokens that a challenge chooses, ascending. Raises ValueError."""
    return indices({**manifest(receipt), "cr": "0.1.1"}, -(-len(receipt.token_ids) // EVERY), size, challenge)


def indices(base: Mapping[str, object], units: int, size: int, challenge: bytes) -> list[int]:
    """CR's rule sha256-ctr-reject-v1. Raises ValueError."""
    if not 1 <= size <= units:
        raise ValueError(f"sample: {size} is outside 1 to the receipt's {units} spans")
    seed = hashlib.sha256(canonical(base) + challenge).digest()
    return sorted(islice(_distinct(seed, units), size))


def _distinct(seed: bytes, units: int) -> Iterator[int]:
    seen = set[int]()
    for counter in count():
        drawn = int.from_bytes(hashlib.sha256(seed + struct.pack(">Q", counter)).digest()[:8], "big")
        if drawn < 2**64 // units * units and drawn % units not in seen:
            seen.add(drawn % units)
            yield drawn % units


def _rows(tokens: Sequence[int]) -> list[bytes]:
    padded = (*tokens, *[PADDING] * (-len(tokens) % EVERY))
    return [struct.pack(f"<{EVERY}I", *padded[at : at + EVERY]) for at in range(0, len(padded), EVERY)]


def _collection(tensors: Mapping[str, bytes]) -> Json:
    named = [{"name": name, "digest": _tensor("u1", [len(data)], data)} for name, data in sorted(tensors.items())]
    return {"digest": _digest(b"".join(map(canonical, named))), "n_tensors": len(named)}


def _tensor(dtype: str, shape: Sequence[int], data: bytes) -> str:
    return _digest(canonical({"dtype": dtype, "shape": shape}) + data)


def _digest(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()
