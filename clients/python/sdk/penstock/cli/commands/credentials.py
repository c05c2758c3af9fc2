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

With `--add` it makes the last of these for further namespaces, and leaves all other secrets as they are.

Invariants: all or nothing (the directory is made beside its final path and moved there); the authority's key is never
written, so nothing else can be signed in its name; files for containers are readable by any user, which the directory's
mode keeps from everybody else on this machine; the rest is readable by its owner only.
"""

import fcntl
import os
import secrets
import shutil
import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.markup import escape

from penstock.cli.connections.options import AsJson
from penstock.cli.terminal.console import emit, err, out, usage_error
from penstock.client.errors import ConfigurationError
from penstock.client.transport.endpoints import (
    DEFAULT_PORTS,
    NAMESPACE,
    SERVICES,
    Endpoints,
    ServiceName,
    Tls,
    read_connection,
    write_connection,
)
from penstock.local.certificates import Authority

ROLES: Final = ("operator", "trainer", "observer")
"""The roles of tokens, from most to least privileged."""

_MARK: Final = "ca.pem"
_CONNECTION: Final = "connection.json"
_LOCAL: Final = ("localhost", "127.0.0.1", "::1")


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
    add: Annotated[
        list[str] | None,
        typer.Option(
            help="A namespace to make tokens for in existing credentials, which stay as they are; repeat. "
            "The services need a restart."
        ),
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
    if wrong := [
        name for name in (*(namespace or ()), *(add or ())) if not NAMESPACE.fullmatch(name) or name == "default"
    ]:
        usage_error(f"{wrong[0]!r} is not a namespace: 1 to 63 of a-z, 0-9 and -, and not `default`")
    place = directory.absolute()
    if place.exists() and not (place / _MARK).is_file() and any(place.iterdir()):
        usage_error(f"{directory} has other files: use an empty directory, or one that this command made")
    if add:
        if renew or namespace or host:
            usage_error("--add leaves everything else as it is: use it without --renew, --namespace and --host")
        try:
            added = extend(place, sorted(set(add)))
        except OSError as error:
            usage_error(f"{error.filename or directory}: {error.strerror}")
        if as_json:
            emit({"directory": str(directory), "made": True, "connection": str(added[0]), "added": sorted(set(add))})
            return
        out.print(f"{escape(str(directory))}: tokens of {', '.join(sorted(set(add)))}; restart the services")
        for connection in added:
            err.print(f"clients: export PENSTOCK_CONNECTION={escape(str(connection))}", soft_wrap=True)
        return
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
            _write_team(fresh, name, own, endpoints)
        _put_in_place(fresh, place)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def extend(place: Path, namespaces: Sequence[str]) -> Sequence[Path]:
    """Adds tokens of these namespaces to credentials; returns their connection files. Every other file keeps its
    content, but for the tables that the services' settings get at their end.

    Raises OSError; ends with a usage error where the directory has no credentials, or has one of the namespaces.
    """
    if not (place / _MARK).is_file():
        usage_error(f"{place} has no credentials yet: use --namespace to make them with these namespaces")
    fresh = Path(tempfile.mkdtemp(prefix=f".{place.name}-", dir=place.parent))
    try:
        with _alone(place.parent):
            shutil.copytree(place, fresh, dirs_exist_ok=True)  # with the modes
            fresh.chmod(0o700)
            try:
                endpoints = read_connection(fresh / _CONNECTION)
            except ConfigurationError as error:
                usage_error(error.message)
            teams = {name: {role: secrets.token_hex(32) for role in ROLES[1:]} for name in namespaces}
            for service in SERVICES:
                _add_tables(fresh / f"{service}.toml", service, teams)
            for name, own in teams.items():
                _write_team(fresh, name, own, replace(endpoints, tls=Tls(Path(_MARK))))
            _put_in_place(fresh, place)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return [place / f"{name}.{_CONNECTION}" for name in namespaces]


@contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """Only one of several commands at a time: each copies what is there, so the last one would undo the others."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _add_tables(path: Path, service: str, teams: Mapping[str, Mapping[str, str]]) -> None:
    text = path.read_text()
    try:
        known = tomllib.loads(text).get(service, {}).get("namespaces", {})
        if there := sorted(teams.keys() & known.keys()):
            usage_error(f"{path.name} has the namespace {there[0]} already: its tokens are in {there[0]}.trainer.token")
        text = text.rstrip("\n") + "\n" + _tables(service, teams)
        tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        usage_error(f"{path.name} cannot be extended: {error}")
    mode = path.stat().st_mode & 0o777
    path.unlink()
    _write(path, text.encode(), mode)


def _write_team(place: Path, name: str, own: Mapping[str, str], endpoints: Endpoints) -> None:
    for role, token in own.items():
        _write(place / f"{name}.{role}.token", f"{token}\n".encode(), 0o400)
    write_connection(place / f"{name}.{_CONNECTION}", replace(endpoints, token=own["trainer"]), pid=None)


def _put_in_place(fresh: Path, place: Path) -> None:
    if not place.exists():
        fresh.rename(place)
        return
    former = fresh.with_name(f"{fresh.name}-former")
    place.rename(former)
    try:
        fresh.rename(place)
    except OSError:
        former.rename(place)  # restore the old ones
        raise
    shutil.rmtree(former)


def _settings(service: str, tokens: Mapping[str, str], teams: Mapping[str, Mapping[str, str]]) -> str:
    """Returns a service's settings file: the tokens that it accepts, and the one that it calls the others with."""
    table = {f"{role}_token": token for role, token in tokens.items()}
    if service == "driver":
        table |= {"sandbox_token": tokens["operator"], "interception_token": tokens["operator"]}
    elif service == "interception":
        table["inference_token"] = tokens["operator"]
    text = f"[{service}]\n" + "".join(f'{key} = "{value}"\n' for key, value in table.items())
    return text + _tables(service, teams)


def _tables(service: str, teams: Mapping[str, Mapping[str, str]]) -> str:
    text = ""
    for name, own in teams.items():
        text += f"\n[{service}.namespaces.{name}]\n"
        text += "".join(f'{role}_token = "{token}"\n' for role, token in own.items())
    return text


def _certificates(hosts: Sequence[str], days: int) -> dict[str, bytes]:
    """Returns PEM by file name: the authority's certificate, one with its key for each service and the dashboard."""
    authority = Authority(days)
    files = {_MARK: authority.certificate}
    for service in (*SERVICES, "dashboard"):
        try:
            signed = authority.sign(service, (service, *_LOCAL, *hosts))
        except ValueError as error:
            usage_error(f"--host: {error}")
        files[f"{service}.pem"], files[f"{service}.key"] = signed.certificate, signed.key
    return files


def _write(path: Path, content: bytes, mode: int) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as stream:
        stream.write(content)
    path.chmod(mode)
