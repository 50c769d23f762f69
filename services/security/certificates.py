"""Reads certificates' identities (extra `mtls`): gRPC drops names' kinds, so two callers could share one."""

from __future__ import annotations

from cryptography import x509
from cryptography.x509.oid import NameOID

KINDS: dict[type[x509.GeneralName], str] = {
    x509.DNSName: "dns",
    x509.RFC822Name: "email",
    x509.UniformResourceIdentifier: "uri",
    x509.IPAddress: "ip",
}


class NoUsableName(ValueError):
    """The certificate cannot be read, or has no usable name."""


def identity_of(pem: bytes) -> str:
    """Returns the first subject alternative name (dns:alice.example), else the subject. Raises NoUsableName."""
    try:
        kind, text = _name(x509.load_pem_x509_certificate(pem))
    except NoUsableName:
        raise
    except Exception as error:  # the parser's input is untrusted
        raise NoUsableName(f"it cannot be read ({type(error).__name__})") from None
    if not text.strip():
        raise NoUsableName(f"its name, of the kind {kind}, is empty")
    if not text.isprintable():
        raise NoUsableName(f"its name, of the kind {kind}, has characters that cannot be printed")
    return f"{kind}:{text}"


def _name(certificate: x509.Certificate) -> tuple[str, str]:
    try:
        first = next(iter(certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value), None)
    except x509.ExtensionNotFound:
        first = None
    if first is not None:
        if (kind := KINDS.get(type(first))) is None:
            raise NoUsableName(
                f"its name has a kind ({type(first).__name__}) that is none of {', '.join(KINDS.values())}"
            )
        return kind, str(first.value)
    # Two organizations may share a common name: use the whole subject.
    common = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    if not any(str(name.value).strip() for name in common):
        raise NoUsableName("it has no subject alternative name and no common name")
    return "subject", certificate.subject.rfc4514_string()
