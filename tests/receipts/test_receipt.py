"""A receipt's JSON has one form, reads within bounds, and says neither prompt nor secret."""

from __future__ import annotations

import copy
import json
import stat
import struct
from dataclasses import fields, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from tandem.receipts.canonical import canonical
from tandem.receipts.computation_receipt import computation_receipt, sampled_spans
from tandem.receipts.keys import DAY, PUBLISHED, SIGNING, open_keys, read_keys, signature_right
from tandem.receipts.receipt import (
    EVERY,
    MOST_VALUES,
    Receipt,
    Served,
    Signed,
    SignedModel,
    SignedRequest,
    VerifiedAt,
    prefix_digests,
    prompt_digest,
    read_signed,
)
from tandem.speculation.errors import InvalidField
from tandem.speculation.types import FinishReason, SamplingParams, Structure, StructureKind, TokenLogprobs
from tests.support import REPOSITORY

SCHEMA = json.loads((REPOSITORY / "tandem" / "receipts" / "receipt.schema.json").read_text())
VECTORS = json.loads((REPOSITORY / "tandem" / "receipts" / "vectors.json").read_text())
SALT, PROMPT, TOKENS = bytes(range(32)), (7, 8, 9), tuple(range(100))


def made(**changes: Any) -> Receipt:
    sampling = SamplingParams(0.9, 40, 0.95, 0.01, 2**64 - 1, ((3, -1.5),), 0.5, 0.25, 1.1)
    sampling = replace(sampling, structure=Structure(StructureKind.REGEX, "é+\n"))
    digest = prompt_digest(SALT, PROMPT)
    receipt = Receipt(
        model=SignedModel("m", "sha256:1", "int8/float32", "t", 258),
        adapter=("red", "r"),
        request=SignedRequest(sampling, 100, "agreement", (257,), (5000,), ("stop",), 1),
        prompt_tokens=len(PROMPT),
        prompt_digest=digest,
        token_ids=TOKENS,
        finish_reason=FinishReason.LENGTH,
        digests=prefix_digests(digest, TOKENS),
        logprobs=tuple(TokenLogprobs(-0.1 * token, ((token, -0.1 * token),)) for token in TOKENS),
        served=Served("S", "0.1.0", "2026-11-25T00:00:00Z", "cpu", "toy", "cpu", "a", True, "ngram", 9, {"ngram": 3}),
        key="ed25519:" + "ab" * 32,
    )
    return replace(receipt, **changes)


SIGNED = Signed(made(), b"s" * 64, SALT)


def test_a_receipt_reads_as_it_was_written_and_fits_its_schema() -> None:
    plain = made(adapter=None, request=SignedRequest(SamplingParams(), 100), logprobs=())
    served = replace(plain.served, verifiers=(VerifiedAt("ed25519:" + "0" * 64, "a"), VerifiedAt("", "")))
    for receipt in (made(), plain, replace(plain, served=served)):
        signed = replace(SIGNED, receipt=receipt)
        again = read_signed(signed.text)
        assert again == signed and again.text == signed.text
        assert read_signed(json.dumps(json.loads(signed.text), indent=3)).receipt.signed == receipt.signed
        jsonschema.validate(json.loads(signed.text), SCHEMA)


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector["name"])
def test_published_vectors_hold(vector: dict[str, Any]) -> None:
    if "refused" in vector:
        with pytest.raises(InvalidField, match=f"^{vector['refused']}: "):
            read_signed(vector["receipt"])
        return
    signed, challenge = read_signed(vector["receipt"]), bytes.fromhex(vector.get("challenge", ""))
    made = computation_receipt(signed, vector.get("size"), challenge)
    assert canonical(made["manifest"]).decode() == vector["manifest"]
    assert made["certificate"] == vector["certificate"] == f"sha256:{sha256(vector['manifest'].encode()).hexdigest()}"
    if "size" in vector:
        assert sampled_spans(signed.receipt, vector["size"], challenge) == vector["spans"]


def test_numbers_and_names_are_written_as_rfc_8785_says() -> None:
    examples = {
        0x0000000000000000: "0",
        0x8000000000000000: "0",
        0x0000000000000001: "5e-324",
        0x7FEFFFFFFFFFFFFF: "1.7976931348623157e+308",
        0x4340000000000001: "9007199254740994",
        0x44B52D02C7E14AF5: "9.999999999999997e+22",
        0x44B52D02C7E14AF6: "1e+23",
        0x444B1AE4D6E2EF4E: "999999999999999700000",
        0x444B1AE4D6E2EF50: "1e+21",
        0x3EB0C6F7A0B5ED8C: "9.999999999999997e-7",
        0x3EB0C6F7A0B5ED8D: "0.000001",
        0x41B3DE4355555553: "333333333.3333332",
        0xBECBF647612F3696: "-0.0000033333333333333333",
    }
    for bits, text in examples.items():
        (value,) = struct.unpack(">d", struct.pack(">Q", bits))
        assert canonical(value).decode() == text
    named = {"\u20ac": 1, "\r": 2, "\ufb33": 3, "1": 4, "\U0001f600": 5, "\x80": 6, "\xf6": 7}
    values = [value for _, value in json.loads(canonical(named), object_pairs_hook=list)]
    assert values == [2, 4, 6, 7, 1, 5, 3]
    for wrong in (float("nan"), float("inf"), 2**53 + 1, "\ud800"):
        with pytest.raises(ValueError):
            canonical(wrong)


def test_digests_chain_every_committed_prefix_to_the_salted_prompt() -> None:
    digests = SIGNED.receipt.digests
    assert len(digests) == -(-len(TOKENS) // EVERY) and SIGNED.receipt.chained()
    assert digests[0] == prefix_digests(SIGNED.receipt.prompt_digest, TOKENS[:EVERY])[-1]
    assert SIGNED.receipt.of_prompt(SALT, PROMPT)
    assert not SIGNED.receipt.of_prompt(bytes(32), PROMPT) and not SIGNED.receipt.of_prompt(SALT, (7, 8))
    assert not made(token_ids=(1, *TOKENS[1:])).chained()


@pytest.mark.parametrize(
    ("where", "value", "said"),
    [
        (("receipt", "version"), 2, "version: not one of 1"),
        (("receipt", "contract"), "tandem.v2", "contract"),
        (("receipt", "more"), 1, "more: not a field of a receipt"),
        (("receipt", "model", "more"), 1, "more: not a field"),
        (("receipt", "model", "vocab_size"), True, "vocab_size: not of type integer"),
        (("receipt", "output", "token_ids"), [258], "token_ids: an id is outside the vocabulary of 258"),
        (("receipt", "output", "token_ids"), [], "token_ids: 0 entries are outside 1 to"),
        (("receipt", "output", "digests"), ["AB" * 32], "digests: not of the form ^[0-9a-f]{64}$"),
        (("receipt", "output", "finish_reason"), "tired", "finish_reason: not one of"),
        (("receipt", "output", "logprobs"), [], "logprobs: 0 for 100 tokens"),
        (("receipt", "request", "rule"), "rejection", "rule: not one of agreement"),
        (("receipt", "request", "max_new_tokens"), 0, "max_new_tokens"),
        (("receipt", "request", "sampling", "seed"), 7, "seed: not of type string"),
        (("receipt", "request", "sampling", "seed"), "-1", "seed: not of the form"),
        (("receipt", "request", "sampling", "seed"), str(2**64), "seed"),
        (("receipt", "request", "sampling", "temperature"), -1.0, "temperature: outside 0 to"),
        (
            ("receipt", "request", "sampling", "temperature"),
            1e400,
            "receipt: not JSON: 'temperature' is inf, not a finite number",
        ),
        (("receipt", "request", "sampling", "structure"), {"kind": "poem", "text": "x"}, "kind: not one of"),
        (("receipt", "adapter"), "red", "adapter: not of type object"),
        (("receipt", "served", "drafted_by"), {"model": -1}, "model: outside 0 to"),
        (("receipt", "served", "processor"), "x" * 2**17, "processor: 131072 characters are outside 0 to 512"),
        (("receipt", "model", "name"), "m\x1b[2J\nreceipt right", "name: has characters that are not printable"),
        (("receipt", "served", "drafted_by"), {"x" * 600: 1, "y": 1}, "drafted_by: 600 characters are outside"),
        (("receipt", "request", "stop_strings"), [""], "stop_strings: 0 characters are outside 1 to"),
        (("receipt", "request", "stop_strings"), ["\ud800"], "stop_strings: has a lone surrogate"),
        (("receipt", "request", "stop_strings"), ["x"] * 1025, "stop_strings: 1025 entries are outside 0 to 1024"),
        (("signature",), "zz" * 64, "signature: not of the form"),
        (("salt",), "", "salt: not of the form"),
        (("receipt",), None, "receipt: not of type object"),
    ],
)
def test_what_a_stranger_may_write_is_refused_by_the_name_of_its_field(
    where: tuple[str, ...], value: Any, said: str
) -> None:
    document = json.loads(SIGNED.text)
    inner = document
    for name in where[:-1]:
        inner = inner[name]
    inner[where[-1]] = value
    with pytest.raises(InvalidField) as caught:
        read_signed(json.dumps(document))
    assert str(caught.value).startswith(said), caught.value


def test_a_missing_field_is_refused_wherever_it_is_missing() -> None:
    def without(part: Any, at: list[str]) -> None:
        for name in list(part):
            if at[-1:] == ["drafted_by"]:
                return
            cut = copy.deepcopy(json.loads(SIGNED.text))
            inner = cut
            for step in at:
                inner = inner[step]
            del inner[name]
            with pytest.raises(InvalidField, match=f"^{name}: missing$"):
                read_signed(json.dumps(cut))
            if isinstance(part[name], dict):
                without(part[name], [*at, name])

    without(json.loads(SIGNED.text), [])


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000, '{"receipt": NaN}', "1" * 5000])
def test_what_is_no_receipt_is_refused_in_a_line(text: str) -> None:
    with pytest.raises(InvalidField, match=r"^(receipt|salt|signature): "):
        read_signed(text)


def test_a_name_that_stands_twice_is_refused_since_readers_differ_in_which_one_counts() -> None:
    for twice in ('"tokens":9,"tokens":3', '"tokens":3,"tokens":3'):
        text = SIGNED.text.replace('"tokens":3', twice)
        assert text != SIGNED.text
        with pytest.raises(InvalidField, match=r"^receipt: not JSON: a name stands twice in one object$"):
            read_signed(text)


def test_the_schema_has_every_field_of_sampling_and_every_structure() -> None:
    sampling = SCHEMA["properties"]["receipt"]["properties"]["request"]["properties"]["sampling"]["properties"]
    assert sampling["structure"]["anyOf"][0]["properties"]["kind"]["enum"] == [each.value for each in StructureKind]
    assert sampling.keys() == {each.name for each in fields(SamplingParams)}
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


@pytest.mark.parametrize("value", ["[],", "{},", "1,"])
def test_values_without_end_are_refused_before_they_are_read(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("tandem.receipts.receipt.parsed")
    text = '{"receipt": [' + value * MOST_VALUES + "1]}"
    with pytest.raises(InvalidField, match=f"^receipt: [0-9]+ values are above the limit of {MOST_VALUES}$"):
        read_signed(text)


def test_the_first_start_makes_a_key_that_only_its_owner_reads_and_later_starts_keep_it(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    first = open_keys(folder, 90, now=0.0)
    assert open_keys(folder, 90, now=89 * DAY).published == first.published
    assert stat.S_IMODE((folder / SIGNING).stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) & 0o077 == 0
    assert [each.key for each in first.published] == [first.public]


def test_an_old_key_is_replaced_and_stays_published_while_its_private_part_is_gone(tmp_path: Path) -> None:
    first = open_keys(tmp_path, 90, now=0.0)
    before, signed = (tmp_path / SIGNING).read_bytes(), first.signed(made(key=first.public), SALT)
    second = open_keys(tmp_path, 90, now=91 * DAY)
    assert second.public != first.public and (tmp_path / SIGNING).read_bytes() != before
    old, new = second.published
    assert (old.key, old.retired, new.key, new.retired) == (first.public, 91 * DAY, second.public, None)
    assert signature_right(signed) and read_keys(json.dumps(second.json)) == second.published
    assert stat.S_IMODE((tmp_path / SIGNING).stat().st_mode) == 0o600


def test_a_signature_is_of_every_byte_that_is_signed_and_of_one_key(tmp_path: Path) -> None:
    keys, others = open_keys(tmp_path / "a", 90), open_keys(tmp_path / "b", 90)
    signed = keys.signed(made(key=keys.public), SALT)
    assert signature_right(signed)
    assert not signature_right(keys.signed(made(key=others.public), SALT))
    forged = type(signed)(made(key=keys.public, prompt_tokens=4), signed.signature, SALT)
    assert not signature_right(forged)
    with pytest.raises(InvalidField, match=r"^key: not ed25519:"):
        signature_right(type(signed)(made(key="ed25519:zz"), signed.signature, SALT))


IDENTITY, EIGHTH = "01" + "00" * 31, "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc"
NO_SECRET = bytes.fromhex(IDENTITY + "00" * 32)
"""A signature that needs no private key, of any message, under the key IDENTITY."""


@pytest.mark.parametrize("weak", [IDENTITY, "00" * 32, "ee" + "ff" * 30 + "7f", EIGHTH + "05", EIGHTH + "85"])
def test_a_key_of_a_small_order_is_none_since_anybody_can_sign_in_its_name(weak: str) -> None:
    Ed25519PublicKey.from_public_bytes(bytes.fromhex(IDENTITY)).verify(NO_SECRET, b"whatever")
    with pytest.raises(InvalidField, match=r"^key: of a small order"):
        signature_right(Signed(made(key=f"ed25519:{weak}"), NO_SECRET, SALT))
    with pytest.raises(InvalidField, match=r"^key: of a small order"):
        read_keys(json.dumps({"keys": [{"key": f"ed25519:{weak}", "created": 0, "retired": None}]}))


def test_a_signature_with_a_multiple_of_the_order_added_is_another_and_wrong(tmp_path: Path) -> None:
    keys = open_keys(tmp_path, 90)
    signed = keys.signed(made(key=keys.public), SALT)
    scalar = int.from_bytes(signed.signature[32:], "little") + 2**252 + 27742317777372353535851937790883648493
    assert not signature_right(replace(signed, signature=signed.signature[:32] + scalar.to_bytes(32, "little")))


def test_a_key_that_others_may_read_is_refused_and_so_is_a_file_without_one(tmp_path: Path) -> None:
    open_keys(tmp_path, 90)
    (tmp_path / SIGNING).chmod(0o640)
    with pytest.raises(InvalidField, match=r"^receipt_keys: .*may be read by others \(mode 640\); chmod 600"):
        open_keys(tmp_path, 90)
    (tmp_path / SIGNING).write_text("no key")
    (tmp_path / SIGNING).chmod(0o600)
    with pytest.raises(InvalidField, match=r"^receipt_keys: .*holds no key"):
        open_keys(tmp_path, 90)
    (tmp_path / SIGNING).unlink()
    (tmp_path / SIGNING).symlink_to("/etc/hostname")
    with pytest.raises(InvalidField, match=r"^receipt_keys: "):
        open_keys(tmp_path, 90)


def test_a_key_whose_published_list_was_lost_is_published_again(tmp_path: Path) -> None:
    first = open_keys(tmp_path, 90)
    (tmp_path / PUBLISHED).unlink()
    assert [each.key for each in open_keys(tmp_path, 90).published] == [first.public]
