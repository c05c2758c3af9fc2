"""Certificates for servers and clients: TLS, and mutual TLS between services.

TLS authenticates the server and encrypts the traffic; a client certificate admits a connection. Neither replaces the
token, which decides what the caller may do.
"""

import ssl
from dataclasses import dataclass
from pathlib import Path

import grpc

from penstock_chassis.errors import InvalidArgument, Violation


@dataclass(frozen=True, slots=True)
class ServerTls:
    """PEM files of a server: its certificate chain and key, and the CA of the clients that may connect (None: any)."""

    cert: Path
    key: Path
    client_ca: Path | None = None

    def credentials(self) -> grpc.ServerCredentials:
        """Reads the files. Raises InvalidArgument `TLS_FILE` when one cannot be read."""
        return grpc.ssl_server_credentials(
            [(read_pem("tls_key", self.key), read_pem("tls_cert", self.cert))],
            root_certificates=read_pem("tls_client_ca", self.client_ca) if self.client_ca else None,
            require_client_auth=self.client_ca is not None,
        )

    def context(self) -> ssl.SSLContext:
        """The same for an HTTP listener. Raises InvalidArgument `TLS_FILE` when a file cannot be read."""
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        try:
            context.load_cert_chain(self.cert, self.key)
            if self.client_ca is not None:
                context.load_verify_locations(self.client_ca)
                context.verify_mode = ssl.CERT_REQUIRED
        except OSError as error:
            reason = error.strerror or "cannot be read"
            raise InvalidArgument(
                f"tls_cert, tls_key or tls_client_ca: {reason}.",
                reason="TLS_FILE",
                violations=[Violation("tls_cert", reason)],
            ) from None
        return context


@dataclass(frozen=True, slots=True)
class ClientTls:
    """PEM files of a client: the CA that signs servers (None: the system's) and its own certificate for mutual TLS."""

    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None

    def credentials(self) -> grpc.ChannelCredentials:
        """Reads the files. Raises InvalidArgument `TLS_FILE` when one cannot be read."""
        return grpc.ssl_channel_credentials(
            root_certificates=read_pem("ca", self.ca) if self.ca else None,
            private_key=read_pem("key", self.key) if self.key else None,
            certificate_chain=read_pem("cert", self.cert) if self.cert else None,
        )


def read_pem(name: str, path: Path) -> bytes:
    """Returns the content of the file that the setting `name` names. Raises InvalidArgument `TLS_FILE` on failure."""
    try:
        return path.read_bytes()
    except OSError as error:
        reason = error.strerror or "cannot be read"
        raise InvalidArgument(
            f"{name}: {path}: {reason}.", reason="TLS_FILE", violations=[Violation(name, reason)]
        ) from None
