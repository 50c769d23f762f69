"""Whom a client's certificate names: read from the certificate itself.

gRPC gives names as text without their kinds, and one text for every name that it does not know, so that two callers
could be one. Needs the extra `mtls`: imported only where certificates tell callers apart.
"""

from __future__ import annotations

from cryptography import x509
from cryptography.x509.oid import NameOID

_UTF8_STRING = 0x0C  # its tag in DER


class NamesNobody(ValueError):
    """The certificate cannot be read, or names nobody in particular."""


def identity_of(pem: bytes) -> str:
    """Kind and text of the first subject alternative name, such as dns:alice.example, else subject: and all of it.

    A subject must have a common name. Raises NamesNobody for what is empty, unknown or not printable.
    """
    try:
        certificate = x509.load_pem_x509_certificate(pem)
        kind, text = _alternative_name(certificate) or _subject(certificate)
    except NamesNobody:
        raise
    except Exception as error:  # a parser of what somebody else wrote
        raise NamesNobody(f"it cannot be read ({type(error).__name__})") from None
    if not text.strip():
        raise NamesNobody(f"its name, of the kind {kind}, is empty")
    if not text.isprintable():
        raise NamesNobody(f"its name, of the kind {kind}, has characters that cannot be printed")
    return f"{kind}:{text}"


def _alternative_name(certificate: x509.Certificate) -> tuple[str, str] | None:
    """Kind and text of the first, or None where there is none."""
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
    raise NamesNobody(f"its name is of a kind that is not known ({type(name).__name__})")


def _other(der: bytes) -> str:
    """The text of a short UTF8String, which a user principal name is; of anything else all its bytes."""
    if len(der) > 2 and der[0] == _UTF8_STRING and der[1] == len(der) - 2 < 128:
        return f"utf8:{der[2:].decode()}"
    if not der[2:]:
        raise NamesNobody("its name, of the kind other, is empty")
    return f"der:{der.hex()}"


def _subject(certificate: x509.Certificate) -> tuple[str, str]:
    """All of it: the same common name may stand in two organisations."""
    common = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    if not any(str(name.value).strip() for name in common):
        raise NamesNobody("it has no subject alternative name and no common name")
    return "subject", certificate.subject.rfc4514_string()
