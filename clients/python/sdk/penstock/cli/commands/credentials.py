"""`penstock credentials`: certificates and tokens for services beyond one machine's loopback.

It makes one directory that only its owner may enter:

    ca.pem                      the authority that signed the services' certificates; clients verify by it
    SERVICE.pem, SERVICE.key    each service's certificate and key
    SERVICE.toml                each service's tokens, as its settings file (`PENSTOCK_CONFIG`)
    ROLE.token                  the tokens of operator, trainer and observer, for people and programs
    scrape.token                the observer's once more, for a Prometheus in a container
    connection.json             a client's connection file, with the trainer's token
    NAMESPACE.trainer.token     of each namespace that is asked for: the tokens of its trainers and observers, and a
    NAMESPACE.observer.token    connection file with the trainers'
    NAMESPACE.connection.json

Invariants: all or nothing (the directory is made beside its final path and moved there); the authority's key is never
written, so nothing else can be signed in its name; files for containers are readable by any user, which the directory's
mode keeps from everybody else on this machine; the rest is readable by its owner only.
"""

import datetime
import ipaddress
import os
import secrets
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.markup import escape

from penstock.cli.connections.options import AsJson
from penstock.cli.terminal.console import emit, err, out, usage_error
from penstock.client.transport.endpoints import (
    DEFAULT_PORTS,
    NAMESPACE,
    SERVICES,
    Endpoints,
    ServiceName,
    Tls,
    write_connection,
)

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

ROLES: Final = ("operator", "trainer", "observer")
"""The roles of tokens, from most to least privileged."""

_MARK: Final = "ca.pem"
_CONNECTION: Final = "connection.json"
_LOCAL: Final = ("localhost", "127.0.0.1", "::1")
_CLOCK_SKEW: Final = datetime.timedelta(minutes=5)


def credentials(
    directory: Annotated[Path, typer.Argument(help="Directory to write; created, and closed to other users.")] = Path(
        "credentials"
    ),
    host: Annotated[
        list[str] | None,
        typer.Option(
            help="A name or address at which clients reach the services; repeat. The connection file has the first."
        ),
    ] = None,
    namespace: Annotated[
        list[str] | None,
        typer.Option(help="A namespace to make tokens for, beside the default one; repeat (docs/guides/teams.md)."),
    ] = None,
    days: Annotated[int, typer.Option(min=1, max=3650, help="How long the certificates are valid.")] = 365,
    renew: Annotated[
        bool, typer.Option(help="Replace existing credentials; services and clients need a restart.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Make certificates, tokens and a connection file for services in containers or on other machines."""
    try:
        import cryptography  # noqa: F401 - only whether it is there
    except ImportError:
        usage_error("certificates need another package: pip install 'penstock[credentials]'")
    if wrong := [name for name in namespace or () if not NAMESPACE.fullmatch(name) or name == "default"]:
        usage_error(f"--namespace: {wrong[0]!r} is not a namespace: 1 to 63 of a-z, 0-9 and -, and not `default`")
    place = directory.absolute()
    if place.exists() and not (place / _MARK).is_file() and any(place.iterdir()):
        usage_error(f"{directory} has other files: use an empty directory, or one that this command made")
    if (place / _MARK).is_file() and not renew:
        err.print(f"{escape(str(directory))} exists: use --renew to replace it", soft_wrap=True)
        if as_json:
            emit({"directory": str(directory), "made": False, "connection": str(place / _CONNECTION)})
        return
    try:
        make(place, host or (), days, sorted(set(namespace or ())))
    except OSError as error:
        usage_error(f"{directory}: {error.strerror}")
    if as_json:
        emit({"directory": str(directory), "made": True, "connection": str(place / _CONNECTION)})
        return
    out.print(f"{escape(str(directory))}: certificates for {days} days, and tokens of {', '.join(ROLES)}")
    err.print(f"clients: export PENSTOCK_CONNECTION={escape(str(place / _CONNECTION))}", soft_wrap=True)


def make(place: Path, hosts: Sequence[str], days: int, namespaces: Sequence[str] = ()) -> None:
    """Fills `place`, replacing an earlier run's files; with tokens of these namespaces too. Raises OSError."""
    place.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{place.name}-", dir=place.parent))  # closed to others
    try:
        tokens = {role: secrets.token_hex(32) for role in ROLES}
        teams = {name: {role: secrets.token_hex(32) for role in ROLES[1:]} for name in namespaces}
        for name, content in _certificates(hosts, days).items():
            _write(fresh / name, content, 0o444)
        for service in SERVICES:
            _write(fresh / f"{service}.toml", _settings(service, tokens, teams).encode(), 0o444)
        for role, token in tokens.items():
            _write(fresh / f"{role}.token", f"{token}\n".encode(), 0o400)
        _write(fresh / "scrape.token", f"{tokens['observer']}\n".encode(), 0o444)
        reached = next(iter(hosts), "127.0.0.1")
        reached = f"[{reached}]" if ":" in reached else reached
        addresses: dict[ServiceName, str] = {name: f"{reached}:{port}" for name, port in DEFAULT_PORTS.items()}
        endpoints = Endpoints(**addresses, token=tokens["trainer"], tls=Tls(Path(_MARK)), discover=True)
        write_connection(fresh / _CONNECTION, endpoints, pid=None)
        for name, own in teams.items():
            for role, token in own.items():
                _write(fresh / f"{name}.{role}.token", f"{token}\n".encode(), 0o400)
            write_connection(fresh / f"{name}.{_CONNECTION}", replace(endpoints, token=own["trainer"]), pid=None)
        if place.exists():
            former = fresh.with_name(f"{fresh.name}-former")
            place.rename(former)
            try:
                fresh.rename(place)
            except OSError:
                former.rename(place)  # restore the old ones
                raise
            shutil.rmtree(former)
        else:
            fresh.rename(place)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _settings(service: str, tokens: Mapping[str, str], teams: Mapping[str, Mapping[str, str]]) -> str:
    """Returns a service's settings file: the tokens that it accepts, and the one that it calls the others with."""
    table = {f"{role}_token": token for role, token in tokens.items()}
    if service == "driver":
        table |= {"sandbox_token": tokens["operator"], "interception_token": tokens["operator"]}
    elif service == "interception":
        table["inference_token"] = tokens["operator"]
    text = f"[{service}]\n" + "".join(f'{key} = "{value}"\n' for key, value in table.items())
    for name, own in teams.items():
        text += f"\n[{service}.namespaces.{name}]\n"
        text += "".join(f'{role}_token = "{token}"\n' for role, token in own.items())
    return text


def _certificates(hosts: Sequence[str], days: int) -> dict[str, bytes]:
    """Returns PEM by file name: the authority's certificate, one with its key for each service and the dashboard."""
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    authority_key = ec.generate_private_key(ec.SECP256R1())
    authority = _authority(authority_key, days)
    files = {_MARK: authority.public_bytes(Encoding.PEM)}
    for service in (*SERVICES, "dashboard"):
        key = ec.generate_private_key(ec.SECP256R1())
        signed = _signed(service, (service, *_LOCAL, *hosts), key, authority, authority_key)
        files[f"{service}.pem"] = signed.public_bytes(Encoding.PEM)
        files[f"{service}.key"] = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return files


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
        usage_error(f"--host: {name!r} is neither a host name nor an address")


def _write(path: Path, content: bytes, mode: int) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as stream:
        stream.write(content)
    path.chmod(mode)
