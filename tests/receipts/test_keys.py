"""Keys of receipts: made once, readable by their owner alone, replaced by age, published for ever."""

from __future__ import annotations

import json
import stat
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from tandem.receipts.keys import DAY, PUBLISHED, SIGNING, open_keys, read_keys, signature_right
from tandem.receipts.receipt import Signed
from tandem.speculation.errors import InvalidField
from tests.receipts.test_receipt import SALT, made


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
