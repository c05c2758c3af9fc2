"""Certificates of services: an authority that exists in memory only, and what it signs.

The authority's key is never written, so nothing can be signed in its name once its process has ended. `cryptography` is
the extra `credentials`, and is imported when an authority is made.
"""

import datetime
import ipaddress
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

_CLOCK_SKEW: Final = datetime.timedelta(minutes=5)


@dataclass(frozen=True, slots=True)
class Signed:
    """A certificate and its private key, both PEM."""

    certificate: bytes
    key: bytes = field(repr=False)


class Authority:
    """Signs certificates of servers, valid for `days` from now.

    Raises:
        ImportError: the extra `credentials` is not installed.
    """

    def __init__(self, days: int) -> None:
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.hazmat.primitives.serialization import Encoding

        self._key = ec.generate_private_key(ec.SECP256R1())
        self._authority = _authority(self._key, days)
        self.certificate = self._authority.public_bytes(Encoding.PEM)
        """PEM; clients verify by it."""

    def sign(self, subject: str, names: Sequence[str]) -> Signed:
        """Returns a certificate for host names and addresses, with a new key.

        Raises:
            ValueError: one of `names` is neither.
        """
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

        key = ec.generate_private_key(ec.SECP256R1())
        signed = _signed(subject, names, key, self._authority, self._key)
        pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        return Signed(signed.public_bytes(Encoding.PEM), pem)


def _authority(key: "ec.EllipticCurvePrivateKey", days: int) -> "x509.Certificate":
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes

    # A unique name each time: two authorities of one name confuse clients that know both.
    name = _name(f"Penstock {secrets.token_hex(4)}")
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_SKEW)
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )


def _signed(
    service: str,
    names: Sequence[str],
    key: "ec.EllipticCurvePrivateKey",
    authority: "x509.Certificate",
    authority_key: "ec.EllipticCurvePrivateKey",
) -> "x509.Certificate":
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes

    public = authority_key.public_key()
    return (
        x509.CertificateBuilder()
        .subject_name(_name(service))
        .issuer_name(authority.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(authority.not_valid_before_utc)
        .not_valid_after(authority.not_valid_after_utc)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([x509.oid.ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName([_general_name(name) for name in names]), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(public), critical=False)
        .sign(authority_key, hashes.SHA256())
    )


def _name(common: str) -> "x509.Name":
    from cryptography import x509

    return x509.Name([x509.NameAttribute(x509.oid.NameOID.COMMON_NAME, common)])


def _usage(*, signs: bool) -> "x509.KeyUsage":
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=not signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs,
        crl_sign=signs,
        encipher_only=False,
        decipher_only=False,
    )


def _general_name(name: str) -> "x509.GeneralName":
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        pass
    try:
        return x509.DNSName(name)
    except ValueError:
        raise ValueError(f"{name!r} is neither a host name nor an address") from None
