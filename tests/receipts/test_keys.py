"""Keys of receipts: made once, readable by their owner alone, replaced by age, published for ever."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from tandem.receipts.keys import DAY, PUBLISHED, SIGNING, open_keys, read_keys, signature_right
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
