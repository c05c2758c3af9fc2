"""Finds the services' addresses and the token to call them with.

Looked up in this order: the caller's arguments; the environment (`PENSTOCK_<SERVICE>_ADDRESS`, `PENSTOCK_TOKEN` or
`PENSTOCK_TOKEN_FILE`, `PENSTOCK_CA_FILE`); the connection file that `penstock up` or `penstock credentials` writes; the
loopback defaults. The namespace in which an operator acts is the caller's argument, or `PENSTOCK_NAMESPACE`. A token is
never sent to an address that it was not given for: the connection file's token goes to the connection file's addresses
only, and none goes in clear beyond this machine.
"""

import ipaddress
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Final, Literal, get_args

import orjson

from penstock.client.errors import ConfigurationError
from penstock.client.transport.atomic_files import writing
from penstock.client.transport.private_files import private_directory

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
"""Default ports of the gRPC servers."""

DEFAULT_INGRESS_PORT: Final = 7780
"""Default port of the interception service's HTTP ingress."""

DEFAULT_DASHBOARD_PORT: Final = 7790
"""Default port of the dashboard."""


_GIVEN: Final = "the calling program"
NAMESPACE: Final = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
"""The form of a namespace's name."""

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
    namespace: str = ""
    """The namespace in which an operator acts. Empty = none named; other tokens belong to one already."""
    discover: bool = True
    """Whether the driver is asked which other drivers, gates and sandbox services there are. False, or
    `PENSTOCK_DISCOVER=false` in the environment = only the addresses given here."""
    dashboard: str = ""
    """Address of a dashboard of these services, such as http://127.0.0.1:7790/. Empty = none is known."""
    origin: str = "the defaults"
    """Origin of the addresses, for people."""
    token_origin: str = _GIVEN
    """Origin of the token, for people."""

    def __post_init__(self) -> None:
        if self.namespace and not NAMESPACE.fullmatch(self.namespace):
            raise ConfigurationError(
                f"{self.namespace!r} is not a namespace: 1 to 63 of a-z, 0-9 and -, the first a letter or digit",
                reason="NAMESPACE_INVALID",
            )
        if self.token is not None:
            _check_token(self.token, self.token_origin)
        for service in SERVICES:
            address = self.address(service)
            if address and self.token is not None and self.tls is None and not is_local(address):
                raise ConfigurationError(
                    f"A token must not be sent in cleartext to {address}: pass tls=, or an address on this machine.",
                    reason="TOKEN_IN_CLEAR",
                )

    def address(self, service: ServiceName) -> str:
        """Returns the address of one service."""
        value: str = getattr(self, service)
        return value

    @property
    def token_advice(self) -> str:
        """Advice for the case that the services refuse the token, or there is none."""
        file = connection_file()
        if self.token is None:
            state = "does not exist"
            if file.exists():
                state = "is from services that have ended, or that only another machine reaches"
            return (
                "No token was sent: set PENSTOCK_TOKEN to one of theirs, PENSTOCK_TOKEN_FILE to a file with it, or"
                " PENSTOCK_CONNECTION to a connection file; or, for services of `penstock up --state-dir DIR`, give the"
                f" command the same --state-dir. (The default is {file}, which {state}.)"
            )
        advice = "the services may have been restarted since"
        if self.token_origin.startswith("PENSTOCK_TOKEN"):
            variable = self.token_origin.partition(" ")[0]
            advice = f"set it to a token of these services, or unset {variable} to use the token of {file}."
        return f"The token that was sent is from {self.token_origin}: {advice}"


Target = str | Path | Mapping[str, str] | Endpoints
"""Target of `connect`: a host that has all four services on their default ports, a connection file, or addresses."""


def resolve(
    target: Target | None = None, token: str | None = None, tls: Tls | None = None, namespace: str | None = None
) -> Endpoints:
    """Finds the endpoints by the order in this module's docstring.

    Args:
        target, token, tls: as in `connect`.
        namespace: None = the target's own, `PENSTOCK_NAMESPACE`, or none.

    Raises:
        ConfigurationError: an address, a token, the namespace or the connection file is invalid; the message names it.
    """
    found = _with(target, token, tls) if isinstance(target, Endpoints) else _found(target, token, tls)
    if namespace is None:
        namespace = found.namespace or os.environ.get("PENSTOCK_NAMESPACE", "")
    discover = found.discover and _environment_discover()
    if (namespace, discover) == (found.namespace, found.discover):
        return found
    return replace(found, namespace=namespace, discover=discover)


def _with(endpoints: Endpoints, token: str | None, tls: Tls | None) -> Endpoints:
    """Returns endpoints with the token and the certificates that the caller gives."""
    sent, token_origin = (token, _GIVEN) if token else (endpoints.token, endpoints.token_origin)
    return replace(endpoints, token=sent, token_origin=token_origin, tls=tls or endpoints.tls)


def _found(target: str | Path | Mapping[str, str] | None, token: str | None, tls: Tls | None) -> Endpoints:
    if isinstance(target, Path):
        return read_connection(target, token, tls)
    chosen_tls = tls or _environment_tls()
    sent, token_origin = (token, _GIVEN) if token else _environment_token()
    if target is not None:
        return Endpoints(
            **_addresses(target),
            token=sent,
            tls=chosen_tls,
            discover=isinstance(target, str) or "driver" in target,  # else nobody named a driver to send the token to
            origin="the target argument",
            token_origin=token_origin,
        )
    environment: dict[str, str] = {
        service: value for service in SERVICES if (value := os.environ.get(f"PENSTOCK_{service.upper()}_ADDRESS"))
    }
    if environment:
        return Endpoints(
            **_addresses(environment),
            token=sent,
            tls=chosen_tls,
            discover="driver" in environment,
            origin="the environment",
            token_origin=token_origin,
        )
    file = connection_file()
    if os.environ.get("PENSTOCK_CONNECTION") and not file.exists():
        raise ConfigurationError(
            f"PENSTOCK_CONNECTION names {file}, which does not exist: set it to the connection.json in the state "
            "directory of a running `penstock up`, or unset it",
            reason="CONNECTION_FILE_ABSENT",
        )
    if _is_live(file):
        return read_connection(file, sent, tls, token_origin=token_origin)
    return Endpoints(token=sent, tls=chosen_tls, token_origin=token_origin)


def of_state_dir(directory: Path) -> Endpoints | None:
    """Returns the endpoints of a running `penstock up --state-dir`; None if nothing runs there.

    Raises:
        ConfigurationError: its connection file is invalid.
    """
    file = directory / CONNECTION_FILE
    return read_connection(file) if _is_live(file) else None


def connection_file() -> Path:
    """Path of the connection file that `penstock up` writes: `$XDG_STATE_HOME/penstock/connection.json`.

    The environment variable `PENSTOCK_CONNECTION` names another, such as one made by `penstock credentials`.
    """
    named = os.environ.get("PENSTOCK_CONNECTION")
    if named:
        return Path(named)
    return state_dir() / CONNECTION_FILE


def state_dir() -> Path:
    """Default state directory of the user's services: `$XDG_STATE_HOME/penstock`, or `~/.local/state/penstock`."""
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "penstock"


def write_connection(file: Path, endpoints: Endpoints, *, pid: int | None) -> None:
    """Writes the connection file atomically, readable by its owner only.

    Args:
        file: its path; its directory is created.
        endpoints: its content. A CA's relative path is relative to the file; a client's certificate is not written.
        pid: of the process of this machine whose end makes the file void; None = it is valid until removed. With a pid
            and an address on loopback, the file is void on other machines.
    """
    content: dict[str, object] = {
        "version": 1,
        "pid": pid,
        "addresses": {service: endpoints.address(service) for service in SERVICES},
        "token": endpoints.token,
    }
    if pid is not None:
        content["host"] = os.uname().nodename
    if not endpoints.discover:
        content["discover"] = False
    if endpoints.dashboard:
        content["dashboard"] = endpoints.dashboard
    if endpoints.tls is not None and endpoints.tls.ca is not None:
        content["ca"] = str(endpoints.tls.ca)
    data = orjson.dumps(content)
    private_directory(file.parent)
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    with writing(file):
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
        if not _is_closed(file.stat()):
            raise ConfigurationError(
                f"{file} has a token, so only you may read it: chmod 600 {file}", reason="CONNECTION_FILE_OPEN"
            )
        content = orjson.loads(file.read_bytes())
        if tls is None and (ca := content.get("ca")) is not None:
            tls = Tls(file.parent / ca)
        addresses = _addresses(content["addresses"])
        sent, found = (token, token_origin) if token else (content["token"], str(file))
        discover = bool(addresses.get("driver")) and content.get("discover") is not False
        return Endpoints(
            **addresses, token=sent, tls=tls, discover=discover, dashboard=str(content.get("dashboard", "")),
            origin=str(file), token_origin=found,
        )  # fmt: skip
    except OSError as error:
        raise ConfigurationError(f"{file} cannot be read: {error.strerror}", reason="CONNECTION_FILE") from None
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
        raise ConfigurationError(
            f"{file} is not a connection file: remove it, or start `penstock up` again", reason="CONNECTION_FILE"
        ) from None


def _is_closed(info: os.stat_result) -> bool:
    """Whether nobody but us, root, and those whom root lets read it can read or change a file.

    Cluster managers mount a secret as a file of root that one group may read.
    """
    if info.st_uid == 0:
        return not info.st_mode & 0o037
    return info.st_uid == os.getuid() and not info.st_mode & 0o077


def _addresses(target: str | Mapping[str, str]) -> dict[ServiceName, str]:
    if isinstance(target, str):
        if not target.strip() or "/" in target or (target.count(":") == 1 and "[" not in target):
            raise ConfigurationError(
                f"{target!r} is not a host name: pass a host (for the default ports), or a mapping of"
                f" {', '.join(SERVICES)} to host:port",
                reason="TARGET",
            )
        host = f"[{target}]" if ":" in target and not target.startswith("[") else target
        return {service: f"{host}:{port}" for service, port in DEFAULT_PORTS.items()}
    known = {item.name for item in fields(Endpoints)} & set(SERVICES)
    unknown = sorted(set(target) - known)
    if unknown:
        raise ConfigurationError(
            f"No such service: {', '.join(unknown)}; services: {', '.join(SERVICES)}", reason="TARGET"
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
    """Whether traffic to an address stays on this machine; a name other than localhost may resolve anywhere."""
    if address.startswith("unix:"):
        return True
    return is_loopback(address.rpartition(":")[0].strip("[]"))


def is_loopback(host: str) -> bool:
    """Whether a host is this machine itself; a name other than localhost may resolve anywhere."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _environment_token() -> tuple[str | None, str]:
    """Returns the token from the environment, and the variable's name."""
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


def _environment_discover() -> bool:
    """Returns whether `PENSTOCK_DISCOVER` lets a driver be asked for others."""
    said = os.environ.get("PENSTOCK_DISCOVER", "")
    if said.lower() not in ("", "0", "1", "false", "true"):
        raise ConfigurationError(
            f"PENSTOCK_DISCOVER is {said!r}: set it to true or false, or unset it", reason="DISCOVER"
        )
    return said.lower() not in ("0", "false")


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
    """Whether the file exists and the stack that wrote it still runs: a killed one leaves its file behind.

    A stack of another machine, with which this one shares the directory, counts as running, since its process is not
    seen from here, unless it has an address that leads to this machine here. Files of earlier versions do not name the
    machine.
    """
    try:
        content = orjson.loads(file.read_bytes())
        pid, host = content["pid"], content.get("host")
        if host not in (None, os.uname().nodename):
            found = Endpoints(**_addresses(content["addresses"]), tls=None, discover=False)
            return not any(is_local(found.address(service)) for service in SERVICES)
    except FileNotFoundError:
        return False
    except (OSError, orjson.JSONDecodeError, ConfigurationError, KeyError, TypeError, AttributeError):
        return True  # reading it again gives the user the error
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    except (PermissionError, TypeError, ValueError, OverflowError):
        return True
    return True
