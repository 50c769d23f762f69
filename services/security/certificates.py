"""Reads certificates' identities (extra `mtls`): gRPC drops names' kinds, so two callers could share one."""

from __future__ import annotations

from cryptography import x509
from cryptography.x509.oid import NameOID

_UTF8_STRING = 0x0C  # its tag in DER


class NoUsableName(ValueError):
    """The certificate cannot be read, or has no usable name."""


def identity_of(pem: bytes) -> str:
    """Returns the first subject alternative name (dns:alice.example), else the subject. Raises NoUsableName."""
    try:
        certificate = x509.load_pem_x509_certificate(pem)
        kind, text = _alternative_name(certificate) or _subject(certificate)
    except NoUsableName:
        raise
    except Exception as error:  # the parser's input is untrusted
        raise NoUsableName(f"it cannot be read ({type(error).__name__})") from None
    if not text.strip():
        raise NoUsableName(f"its name, of the kind {kind}, is empty")
    if not text.isprintable():
        raise NoUsableName(f"its name, of the kind {kind}, has characters that cannot be printed")
    return f"{kind}:{text}"


def _alternative_name(certificate: x509.Certificate) -> tuple[str, str] | None:
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return None
    return next((_named(name) for name in names), None)


def _named(name: x509.GeneralName) -> tuple[str, str]:
    match name:
        case x509.DNSName():
            return "dns", name.value
        case x509.RFC822Name():
            return "email", name.value
        case x509.UniformResourceIdentifier():
            return "uri", name.value
        case x509.IPAddress():
            return "ip", str(name.value)
        case x509.DirectoryName():
            return "directory", name.value.rfc4514_string()
        case x509.RegisteredID():
            return "oid", name.value.dotted_string
        case x509.OtherName():
            return f"other:{name.type_id.dotted_string}", _other(name.value)
    raise NoUsableName(f"its name has an unknown type ({type(name).__name__})")


def _other(der: bytes) -> str:
    if len(der) > 2 and der[0] == _UTF8_STRING and der[1] == len(der) - 2 < 128:
        return f"utf8:{der[2:].decode()}"
    if not der[2:]:
        raise NoUsableName("its name, of the kind other, is empty")
    return f"der:{der.hex()}"


def _subject(certificate: x509.Certificate) -> tuple[str, str]:
    # Two organizations may share a common name: use the whole subject.
    common = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    if not any(str(name.value).strip() for name in common):
        raise NoUsableName("it has no subject alternative name and no common name")
    return "subject", certificate.subject.rfc4514_string()
