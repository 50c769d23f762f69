"""Receipt signing keys: `signing.pem`, overwritten at rotation; `published.json`, all public keys."""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem.checkpoints.json_files import parsed
from tandem.checkpoints.trusted_cache import locked, private_folder, write_whole
from tandem.installing import install_command
from tandem.receipts.receipt import Receipt, Signed
from tandem.receipts.schema import check
from tandem.speculation.errors import InvalidField

if TYPE_CHECKING:  # a library that servers without receipts need not have
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

KIND = "ed25519:"
_HEX = 64
_KEY = {
    "key": {"type": "string", "maxLength": 512, "format": "printable"},
    "created": {"type": "number"},
    "retired": {"anyOf": [{"type": "number"}, {"type": "null"}]},
}
_ENTRY = {"type": "object", "required": list(_KEY), "properties": _KEY, "additionalProperties": False}
_LIST = {
    "type": "object",
    "required": ["keys"],
    "properties": {"keys": {"type": "array", "items": _ENTRY}},
    "additionalProperties": False,
}
SIGNING, PUBLISHED = "signing.pem", "published.json"
DAY = 86400.0
_PRIME = 2**255 - 19
_EIGHTH = 0x7A03AC9277FDC74EC6CC392CFA53202A0F67100D760B3CBA4FD84D3D706A17C7
_WEAK = frozenset((0, 1, _PRIME - 1, _EIGHTH, _PRIME - _EIGHTH))
"""Points of small order: a signature under such a key fits many messages."""


@dataclass(frozen=True, slots=True)
class PublishedKey:
    key: str
    created: float
    retired: float | None = None


@dataclass(frozen=True, slots=True)
class Keys:
    """`published`: all public keys, the current one last."""

    private: Ed25519PrivateKey
    published: tuple[PublishedKey, ...]

    @property
    def public(self) -> str:
        return self.published[-1].key

    @property
    def json(self) -> dict[str, Any]:
        return _document(self.published)

    def signed(self, receipt: Receipt, salt: bytes) -> Signed:
        return Signed(receipt, self.private.sign(receipt.signed), salt)


def open_keys(folder: Path, days: float, now: float | None = None) -> Keys:
    """Opens the keys in `folder`, created if missing or older than `days`. Raises ValueError."""
    if not days > 0:
        raise InvalidField("receipt_key_days", f"{days} is not above 0")
    ed25519 = _library("receipt_keys")
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    moment = time.time() if now is None else now
    try:
        found = private_folder(folder)
        with locked(found / "lock"):
            file = found / PUBLISHED
            published = read_keys(file.read_text(encoding="utf-8")) if file.exists() else ()
            private = _read_private(found / SIGNING)
            if private and (not published or published[-1].key != public_of(private)):
                published = _published_with(found, published, private, moment)
            if private is None or moment - published[-1].created > days * DAY:
                private = ed25519.Ed25519PrivateKey.generate()
                pem = private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
                write_whole(found / SIGNING, pem.decode())  # readable by its owner alone from the start
                published = _published_with(found, published, private, moment)
    except OSError as error:
        raise InvalidField("receipt_keys", f"{folder}: {error.strerror or error}") from None
    return Keys(private, published)


def public_of(private: Ed25519PrivateKey) -> str:
    return KIND + private.public_key().public_bytes_raw().hex()


def signature_right(signed: Signed) -> bool:
    """Verifies the signature by the receipt's key. Raises ValueError without a key."""
    ed25519 = _library("receipt")
    from cryptography.exceptions import InvalidSignature

    public = ed25519.Ed25519PublicKey.from_public_bytes(_raw(signed.receipt.key))
    try:
        public.verify(signed.signature, signed.receipt.signed)
    except InvalidSignature:
        return False
    return True


def read_keys(text: str) -> tuple[PublishedKey, ...]:
    try:
        data = parsed(text)
    except ValueError as error:
        raise InvalidField("keys", f"not JSON: {error}") from None
    check("keys", data, _LIST)
    for each in data["keys"]:
        _raw(each["key"])
    return tuple(PublishedKey(each["key"], each["created"], each["retired"]) for each in data["keys"])


def _raw(key: str) -> bytes:
    digits = key.removeprefix(KIND)
    if not (key.startswith(KIND) and len(digits) == _HEX and set(digits) <= set("0123456789abcdef")):
        raise InvalidField("key", f"not {KIND} and {_HEX} hexadecimal digits")
    raw = bytes.fromhex(digits)
    if int.from_bytes(raw, "little") % 2**255 % _PRIME in _WEAK:
        raise InvalidField("key", "of a small order: anybody can sign in its name")
    return raw


def _published_with(
    folder: Path, published: Iterable[PublishedKey], private: Ed25519PrivateKey, moment: float
) -> tuple[PublishedKey, ...]:
    retired = (each if each.retired is not None else replace(each, retired=moment) for each in published)
    after = (*retired, PublishedKey(public_of(private), moment))
    write_whole(folder / PUBLISHED, json.dumps(_document(after), indent=1) + "\n")
    return after


def _document(published: Iterable[PublishedKey]) -> dict[str, Any]:
    return {"keys": [asdict(each) for each in published]}


def _read_private(file: Path) -> Ed25519PrivateKey | None:
    # Raises InvalidField if others could have read or written it.
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        number = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    with os.fdopen(number, "rb") as opened:
        status = os.fstat(number)
        mode = stat.S_IMODE(status.st_mode)
        if status.st_uid != os.geteuid() or mode & 0o077:
            whose = f"mode {mode:o}" if status.st_uid == os.geteuid() else f"of another user, uid {status.st_uid}"
            raise InvalidField("receipt_keys", f"{file} may be read by others ({whose}); chmod 600, or remove it")
        data = opened.read(2**16)
    try:
        private = load_pem_private_key(data, password=None)
    except (ValueError, TypeError) as error:
        raise InvalidField("receipt_keys", f"{file} holds no key: {error}") from None
    if not isinstance(private, Ed25519PrivateKey):
        raise InvalidField("receipt_keys", f"{file} holds a key of another kind than Ed25519")
    return private


def _library(field: str) -> Any:
    try:
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ModuleNotFoundError:
        raise InvalidField(field, f"cryptography is not installed; {install_command('receipts')}") from None
    return ed25519
