"""Certificates for servers and clients: TLS, and mutual TLS between services.

TLS proves who the server is and hides what is said; a client certificate admits a connection. Neither replaces the
token, which says what the caller may do.
"""

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
            [(_read("tls_key", self.key), _read("tls_cert", self.cert))],
            root_certificates=_read("tls_client_ca", self.client_ca) if self.client_ca else None,
            require_client_auth=self.client_ca is not None,
        )


@dataclass(frozen=True, slots=True)
class ClientTls:
    """PEM files of a client: the CA that signs servers (None: the system's) and its own certificate for mutual TLS."""

    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None

    def credentials(self) -> grpc.ChannelCredentials:
        """Reads the files. Raises InvalidArgument `TLS_FILE` when one cannot be read."""
        return grpc.ssl_channel_credentials(
            root_certificates=_read("ca", self.ca) if self.ca else None,
            private_key=_read("key", self.key) if self.key else None,
            certificate_chain=_read("cert", self.cert) if self.cert else None,
        )


def _read(name: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        reason = error.strerror or "cannot be read"
        raise InvalidArgument(
            f"{name}: {path}: {reason}.", reason="TLS_FILE", violations=[Violation(name, reason)]
        ) from None
