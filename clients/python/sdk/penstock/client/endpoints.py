"""Where the services are, and with which token they are called.

Looked for in this order: what the caller says; the environment (`PENSTOCK_<SERVICE>_ADDRESS`, `PENSTOCK_TOKEN` or
`PENSTOCK_TOKEN_FILE`, `PENSTOCK_CA_FILE`); the connection file that `penstock up` or `penstock credentials` writes; the
loopback defaults. A token never travels to an address that it was not given for: the connection file's token goes to
the connection file's addresses only, and none goes in clear beyond this machine.
"""

import ipaddress
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Final, Literal, get_args

import orjson

from penstock.client.errors import ConfigurationError
from penstock.client.private import private_directory

ServiceName = Literal["sandbox", "driver", "interception", "inference"]
"""The four services."""

SERVICES: Final[tuple[ServiceName, ...]] = get_args(ServiceName)
"""The four services' names."""

DEFAULT_PORTS: Final[Mapping[ServiceName, int]] = {
    "sandbox": 7701,
    "driver": 7702,
    "interception": 7703,
    "inference": 7704,
}
"""Ports of the gRPC servers when nothing else is said."""

DEFAULT_INGRESS_PORT: Final = 7780
"""Port of the interception service's HTTP ingress when nothing else is said."""

DEFAULT_DASHBOARD_PORT: Final = 7790
"""Port of the dashboard when nothing else is said."""


_GIVEN: Final = "the program that calls"

CONNECTION_FILE: Final = "connection.json"
"""Name of the connection file in a state directory."""


@dataclass(frozen=True, slots=True)
class Tls:
    """Certificates, as PEM files: without `ca` the system's roots are trusted; `cert` and `key` are the client's."""

    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoints:
    """The addresses (`host:port`) of the four services, and how to call them. Empty = there is no such service."""

    sandbox: str = f"127.0.0.1:{DEFAULT_PORTS['sandbox']}"
    driver: str = f"127.0.0.1:{DEFAULT_PORTS['driver']}"
    interception: str = f"127.0.0.1:{DEFAULT_PORTS['interception']}"
    inference: str = f"127.0.0.1:{DEFAULT_PORTS['inference']}"
    token: str | None = field(default=None, repr=False)
    tls: Tls | None = None
    origin: str = "the defaults"
    """Where they were found, for people."""
    token_origin: str = _GIVEN
    """Where the token was found, for people."""

    def __post_init__(self) -> None:
        if self.token is not None:
            _check_token(self.token, self.token_origin)
        for service in SERVICES:
            address = self.address(service)
            if address and self.token is not None and self.tls is None and not is_local(address):
                raise ConfigurationError(
                    f"A token is not sent in clear to {address}: give tls=, or an address on this machine.",
                    reason="TOKEN_IN_CLEAR",
                )

    def address(self, service: ServiceName) -> str:
        """The address of one service."""
        value: str = getattr(self, service)
        return value

    @property
    def token_advice(self) -> str:
        """What to do where the services do not take the token, or there is none."""
        file = connection_file()
        if self.token is None:
            state = "is of services that have ended" if file.exists() else "does not exist"
            return (
                "No token was sent: set PENSTOCK_TOKEN to one of theirs, PENSTOCK_TOKEN_FILE to a file with it, or"
                " PENSTOCK_CONNECTION to a connection file; or, for services of `penstock up --state-dir DIR`, give the"
                f" command the same --state-dir. (By default {file} is read, which {state}.)"
            )
        advice = "are these services of another start than it?"
        if self.token_origin.startswith("PENSTOCK_TOKEN"):
            variable = self.token_origin.partition(" ")[0]
            advice = f"set it to a token of these services, or unset {variable} to use that of {file}."
        return f"The token that was sent is from {self.token_origin}: {advice}"


Target = str | Path | Mapping[str, str] | Endpoints
"""What `connect` takes: a host that has all four services on their default ports, a connection file, or addresses."""


def resolve(target: Target | None = None, token: str | None = None, tls: Tls | None = None) -> Endpoints:
    """Finds the endpoints by the order in this module's docstring.

    Raises:
        ConfigurationError: an address, a token or the connection file does not hold; says which.
    """
    if isinstance(target, Endpoints):
        return target
    if isinstance(target, Path):
        return read_connection(target, token, tls)
    said = tls or _environment_tls()
    sent, token_origin = (token, _GIVEN) if token else _environment_token()
    if target is not None:
        origin = "the target that was given"
        return Endpoints(**_addresses(target), token=sent, tls=said, origin=origin, token_origin=token_origin)
    environment: dict[str, str] = {
        service: value for service in SERVICES if (value := os.environ.get(f"PENSTOCK_{service.upper()}_ADDRESS"))
    }
    if environment:
        origin = "the environment"
        return Endpoints(**_addresses(environment), token=sent, tls=said, origin=origin, token_origin=token_origin)
    file = connection_file()
    if os.environ.get("PENSTOCK_CONNECTION") and not file.exists():
        raise ConfigurationError(
            f"PENSTOCK_CONNECTION names {file}, which does not exist: name the connection.json in the state directory"
            " of a `penstock up` that runs, or unset it",
            reason="CONNECTION_FILE_ABSENT",
        )
    if _is_live(file):
        return read_connection(file, sent, tls, token_origin=token_origin)
    return Endpoints(token=sent, tls=said, token_origin=token_origin)


def of_state_dir(directory: Path) -> Endpoints | None:
    """What `penstock up --state-dir` keeps running there; None where nothing runs.

    Raises:
        ConfigurationError: its connection file does not hold.
    """
    file = directory / CONNECTION_FILE
    return read_connection(file) if _is_live(file) else None


def connection_file() -> Path:
    """Where `penstock up` says how to reach what it started: `$XDG_STATE_HOME/penstock/connection.json`.

    The environment variable `PENSTOCK_CONNECTION` names another, such as the one that `penstock credentials` made.
    """
    named = os.environ.get("PENSTOCK_CONNECTION")
    if named:
        return Path(named)
    return state_dir() / CONNECTION_FILE


def state_dir() -> Path:
    """Where services of one person keep their state: `$XDG_STATE_HOME/penstock`, or `~/.local/state/penstock`."""
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "penstock"


def write_connection(file: Path, endpoints: Endpoints, *, pid: int | None) -> None:
    """Writes the connection file, readable by its owner only, under a temporary name first.

    Args:
        file: where; its directory is made.
        endpoints: what it says. A CA's relative path is relative to the file; a client's certificate is not written.
        pid: of the process whose end makes the file void; None = it holds until somebody removes it.
    """
    content: dict[str, object] = {
        "version": 1,
        "pid": pid,
        "addresses": {service: endpoints.address(service) for service in SERVICES},
        "token": endpoints.token,
    }
    if endpoints.tls is not None and endpoints.tls.ca is not None:
        content["ca"] = str(endpoints.tls.ca)
    data = orjson.dumps(content)
    private_directory(file.parent)
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(data)
        temporary.replace(file)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def read_connection(
    file: Path, token: str | None = None, tls: Tls | None = None, *, token_origin: str = _GIVEN
) -> Endpoints:
    """Reads a connection file; `token`, which comes from `token_origin`, and `tls` replace the file's.

    Raises:
        ConfigurationError: it cannot be read, is not ours alone, or is malformed.
    """
    try:
        info = file.stat()
        if info.st_uid not in (os.getuid(), 0) or stat.S_IMODE(info.st_mode) & 0o077:
            raise ConfigurationError(
                f"{file} holds a token and must be yours alone: chmod 600 {file}", reason="CONNECTION_FILE_OPEN"
            )
        content = orjson.loads(file.read_bytes())
        if tls is None and (ca := content.get("ca")) is not None:
            tls = Tls(file.parent / ca)
        addresses = _addresses(content["addresses"])
        sent, found = (token, token_origin) if token else (content["token"], str(file))
        return Endpoints(**addresses, token=sent, tls=tls, origin=str(file), token_origin=found)
    except OSError as error:
        raise ConfigurationError(f"{file} cannot be read: {error.strerror}", reason="CONNECTION_FILE") from None
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
        raise ConfigurationError(
            f"{file} is no connection file: remove it, or start `penstock up` again", reason="CONNECTION_FILE"
        ) from None


def _addresses(target: str | Mapping[str, str]) -> dict[ServiceName, str]:
    if isinstance(target, str):
        if not target.strip() or "/" in target or (target.count(":") == 1 and "[" not in target):
            raise ConfigurationError(
                f"{target!r} is no host name: give a host (the default ports are used), or a mapping of"
                f" {', '.join(SERVICES)} to host:port",
                reason="TARGET",
            )
        host = f"[{target}]" if ":" in target and not target.startswith("[") else target
        return {service: f"{host}:{port}" for service, port in DEFAULT_PORTS.items()}
    known = {item.name for item in fields(Endpoints)} & set(SERVICES)
    unknown = sorted(set(target) - known)
    if unknown:
        raise ConfigurationError(
            f"No such service: {', '.join(unknown)}; there are {', '.join(SERVICES)}", reason="TARGET"
        )
    for service, address in target.items():
        if address and not _is_address(address):
            raise ConfigurationError(f"The address of {service} is not host:port: {address!r}", reason="TARGET")
    return {service: target[service] for service in SERVICES if service in target}


def _is_address(address: str) -> bool:
    if address.startswith("unix:"):
        return len(address) > len("unix:")
    host, colon, port = address.rpartition(":")
    return bool(host and colon and "/" not in host and port.isascii() and port.isdigit() and 0 < int(port) < 65536)


def is_local(address: str) -> bool:
    """Whether what is sent to an address stays on this machine; a name other than localhost may be anybody's."""
    if address.startswith("unix:"):
        return True
    return is_loopback(address.rpartition(":")[0].strip("[]"))


def is_loopback(host: str) -> bool:
    """Whether a host is this machine itself; a name other than localhost may be anybody's."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _environment_token() -> tuple[str | None, str]:
    """A token that the environment names, and by which variable."""
    token, file = os.environ.get("PENSTOCK_TOKEN"), os.environ.get("PENSTOCK_TOKEN_FILE")
    if token is not None:
        return token, "PENSTOCK_TOKEN"
    if file is None:
        return None, ""
    try:
        found = Path(file).read_text(encoding="utf-8").removesuffix("\n").removesuffix("\r")
    except (OSError, UnicodeDecodeError):
        raise ConfigurationError(f"PENSTOCK_TOKEN_FILE names {file}, which cannot be read", reason="TOKEN") from None
    return found, f"PENSTOCK_TOKEN_FILE ({file})"


def _environment_tls() -> Tls | None:
    file = os.environ.get("PENSTOCK_CA_FILE")
    return Tls(Path(file)) if file else None


def _check_token(token: str, origin: str) -> None:
    if not token or token != token.strip() or not token.isascii() or not token.isprintable():
        raise ConfigurationError(
            f"A token must be printable ASCII, not blank and without whitespace around it; this one is from {origin}",
            reason="TOKEN",
        )


def _is_live(file: Path) -> bool:
    """Whether the file is there and the stack that wrote it still runs: one that was killed leaves its file behind."""
    try:
        content = orjson.loads(file.read_bytes())
        pid = content["pid"]
    except FileNotFoundError:
        return False
    except (OSError, orjson.JSONDecodeError, KeyError, TypeError):
        return True  # reading it again tells the person what is wrong
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    except (PermissionError, TypeError, ValueError, OverflowError):
        return True
    return True
