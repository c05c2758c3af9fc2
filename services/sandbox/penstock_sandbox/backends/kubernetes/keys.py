"""The key pairs between a sandbox service and its pods: the template's, and one for each claim.

Each end of a connection has a certificate that the other end knows: certificates are pinned, and there is no authority
that could sign another. The key of a claim is the same at both ends, made here and never written to this machine's
disk for longer than loading takes.
"""

from __future__ import annotations

import datetime
import ssl
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_TOLERANCE: Final = datetime.timedelta(hours=1)
"""How much the clocks of nodes may differ."""


def self_signed(name: str, days: int) -> tuple[str, str]:
    """Returns a new certificate and its key, both PEM, valid for so many days from now."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _TOLERANCE)
        .not_valid_after(now + datetime.timedelta(days=days))
        .sign(key, hashes.SHA256())
    )
    return (
        certificate.public_bytes(serialization.Encoding.PEM).decode(),
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        ).decode(),
    )


@dataclass(frozen=True, slots=True)
class ClaimKey:
    """The key pair of one claim: `pem` is what its pod gets, `context` this end's."""

    pem: str
    context: ssl.SSLContext

    @classmethod
    def make(cls, days: int) -> ClaimKey:
        """Returns a new one."""
        certificate, key = self_signed("penstock-claim", days)
        pem = key + certificate
        with tempfile.NamedTemporaryFile("w") as file:
            file.write(pem)
            file.flush()
            return cls(pem, client_context(Path(file.name), Path(file.name)))

    def __repr__(self) -> str:
        return "ClaimKey()"


def client_context(own: Path, peer: Path) -> ssl.SSLContext:
    """Returns a client's context: `own` has its certificate and key, `peer` the only server's certificate.

    Raises OSError (ssl.SSLError too) for files that cannot be read.
    """
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    made.minimum_version = ssl.TLSVersion.TLSv1_3
    made.check_hostname = False  # pods have addresses, and the certificate itself is known
    made.verify_mode = ssl.CERT_REQUIRED
    made.load_cert_chain(own)
    made.load_verify_locations(peer)
    return made
