"""The proxy's certificate authority: its own certificate, which sandboxes trust, and one for each host.

Invariants: its key is readable by the service's user alone and never in a sandbox; a certificate names one host.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import ssl
import tempfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from penstock.values.hosts import address

_CA_DAYS: Final = 3650
_HOST_DAYS: Final = 30
_RENEWED_DAYS: Final = 90
"""A CA that ends sooner than this is replaced at the start."""
_MOST_HOSTS: Final = 512


class Authority:
    """Signs a certificate for each host that is asked for."""

    def __init__(self, folder: Path, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
        self._folder = folder
        self._certificate = certificate
        self._key = key
        self._host_key = ec.generate_private_key(ec.SECP256R1())
        self._contexts: OrderedDict[str, ssl.SSLContext] = OrderedDict()

    @classmethod
    def open(cls, folder: Path) -> Authority:
        """Reads the authority in ``folder``, or makes one. It is kept: snapshots hold programs that trust it."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = folder / "authority.pem"
        if path.exists():
            held = path.read_bytes()
            certificate = x509.load_pem_x509_certificate(held)
            key = serialization.load_pem_private_key(held, None)
            left = certificate.not_valid_after_utc - datetime.datetime.now(datetime.UTC)
            if isinstance(key, ec.EllipticCurvePrivateKey) and left > datetime.timedelta(days=_RENEWED_DAYS):
                return cls(folder, certificate, key)
        made = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Penstock egress")])
        certificate = (
            _begun(name, name, made, _CA_DAYS)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(signs=True), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(made.public_key()), critical=False)
            .sign(made, hashes.SHA256())
        )
        _write_private(path, _pem(certificate) + _key_pem(made))
        return cls(folder, certificate, made)

    @property
    def pem(self) -> bytes:
        """The CA's certificate."""
        return _pem(self._certificate)

    def context(self, host: str) -> ssl.SSLContext:
        """Returns a server's context for connections to one host, kept for the next one."""
        found = self._contexts.get(host)
        if found is None:
            found = self._contexts[host] = self._made(host)
            if len(self._contexts) > _MOST_HOSTS:
                self._contexts.popitem(last=False)
        self._contexts.move_to_end(host)
        return found

    def _made(self, host: str) -> ssl.SSLContext:
        written = address(host)
        name: x509.GeneralName = x509.DNSName(host) if written is None else x509.IPAddress(ipaddress.ip_address(host))
        certificate = (
            # A common name holds 64 characters; the alternative name is what counts.
            _begun(x509.Name([]), self._certificate.subject, self._host_key, _HOST_DAYS)
            .add_extension(x509.SubjectAlternativeName([name]), critical=True)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        with tempfile.NamedTemporaryFile(dir=self._folder) as file:
            file.write(_pem(certificate) + _key_pem(self._host_key))
            file.flush()
            context.load_cert_chain(file.name)
        if written is None:
            context.sni_callback = _only(host)
        return context


def _only(host: str) -> Callable[[ssl.SSLObject, str | None, ssl.SSLContext], int | None]:
    """Returns a check that refuses a TLS name other than ``host``."""

    def check(_socket: ssl.SSLObject, name: str | None, _context: ssl.SSLContext) -> int | None:
        return None if name is not None and name.lower() == host else ssl.ALERT_DESCRIPTION_UNRECOGNIZED_NAME

    return check


def _begun(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        # Clocks of sandboxes on other machines may be behind.
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def _usage(*, signs: bool) -> x509.KeyUsage:
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


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _write_private(path: Path, content: bytes) -> None:
    part = path.with_suffix(".part")
    part.unlink(missing_ok=True)
    with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
