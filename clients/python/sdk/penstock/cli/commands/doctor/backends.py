"""The part of `penstock doctor` for sandbox backends beyond this machine's own: docker, e2b, hf and kubernetes.

For each it reports whether its SDK is installed, whether it is configured, and whether its dependencies answer, by
asking: the daemon about itself, the provider for something free of cost. A running sandbox service is asked as well,
since its configuration may differ from this command's environment.

Invariants: all requests run at once and none takes longer than `_LIMIT_S`; a key is sent in a header to the address
that it is configured for only, never in clear beyond this machine and never after a redirect, and is in no finding;
nothing is changed anywhere.
"""

import asyncio
import http.client
import importlib.metadata
import ipaddress
import os
import socket
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import orjson

from penstock.cli.commands.doctor.findings import Finding, of_error
from penstock.cli.connections.service_selection import running
from penstock.client import Backend, PenstockError, connect
from penstock.client.transport.endpoints import Endpoints

_LIMIT_S: Final = 8.0
_CALL_S: Final = 5.0
_BODY_BYTES: Final = 4 * 1024 * 1024
_DOCKER_SOCKET: Final = "unix:///var/run/docker.sock"
_MIN_DOCKER_API: Final = (1, 41)
_SETTING: Final = "PENSTOCK_SANDBOX_"
_SHARING: Final = ("local", "docker")
_LIMITED: Final = ("memory", "pids", "disk")


def look_at_backends(state_dir: Path | None = None) -> list[Finding]:
    """Returns a finding per backend, and two of the sandbox service if there is one; in at most `_LIMIT_S` seconds."""
    looks: dict[str, Callable[[], Finding]] = {"docker": docker, "e2b": e2b, "hf": hf, "kubernetes": kubernetes}
    found: dict[str, Finding] = {}

    def keep(name: str, look: Callable[[], Finding]) -> None:
        found[name] = look()

    end = time.monotonic() + _LIMIT_S
    # Daemon threads: a hanging name lookup cannot be interrupted, and must not delay the command's exit.
    threads = [threading.Thread(target=keep, args=item, daemon=True) for item in looks.items()]
    for thread in threads:
        thread.start()
    service = _service(state_dir)
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    silent = "it did not answer in time"
    return [*service, *(found.get(name) or _not_ok(name, silent, "try again", {}) for name in looks)]


# A running service ----------------------------------------------------------------------------------------------


def _service(state_dir: Path | None) -> Iterator[Finding]:
    """A sandbox service's view of its backends; nothing if none is configured and none answers."""
    name = "sandbox service"
    try:
        endpoints = running(state_dir)
    except PenstockError as error:
        yield _not_ok(name, str(error), "", {})
        return
    if not endpoints.sandbox:
        return
    details = {"address": endpoints.sandbox}
    try:
        backends = asyncio.run(_asked(endpoints))
    except (PenstockError, OSError, TimeoutError) as error:
        if endpoints.origin != "the defaults":
            yield of_error(name, endpoints.sandbox, error, endpoints.origin, details)
        return
    yield _usable(name, endpoints, backends, details)
    yield limits(backends)


async def _asked(endpoints: Endpoints) -> Sequence[Backend]:
    async with asyncio.timeout(_CALL_S):
        host, _, port = endpoints.sandbox.rpartition(":")
        _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
        writer.close()
        async with connect(endpoints) as ps:
            return await ps.sandboxes.backends()


def _usable(name: str, endpoints: Endpoints, backends: Sequence[Backend], details: Mapping[str, str | bool]) -> Finding:
    states = [
        f"{one.name}: {'ready' if one.available else one.unavailable_reason}" for one in backends if one.is_default
    ] + [
        f"{one.name}: {'ready' if one.available else one.unavailable_reason}" for one in backends if not one.is_default
    ]
    usable = any(one.available and one.is_default for one in backends)
    found = f"at {endpoints.sandbox}; " + "; ".join(states)
    advice = "" if usable else "its default backend, listed first, is unavailable: see its reason"
    return Finding(name, usable, False, found, advice, {**details, **{one.name: one.available for one in backends}})


def limits(backends: Sequence[Backend]) -> Finding:
    """Limits that backends with shared machines cannot enforce. A provider's sandbox has a machine of its own."""
    missing = {
        one.name: [what for what in _LIMITED if f"limit_{what}" not in one.capabilities]
        for one in backends
        if one.available and one.name in _SHARING
    }
    kinds = {one.name: one.disk_limit for one in backends}
    found = "; ".join(
        f"{name}: {'no limit of ' + ', '.join(lacks) if lacks else 'memory, pids and disk'}"
        + ("; disk watched" if kinds[name] == "watched" else "")
        for name, lacks in missing.items()
    )
    ok = not any(missing.values())
    details = {name: ", ".join(lacks) for name, lacks in missing.items()}
    advice = "" if ok else "one sandbox can use all of it, and a spec with such a limit is refused"
    return Finding("sandbox limits", ok, False, found or "no backend shares a machine", advice, details)


# Docker --------------------------------------------------------------------------------------------------------------


def docker() -> Finding:
    """Its SDK, and the daemon's version, storage driver, control groups, and whether it has gVisor."""
    host = _value(_SETTING + "DOCKER_HOST", "DOCKER_HOST") or _DOCKER_SOCKET
    shown = _without_user(host)
    sdk, details = _sdk("docker")
    details["address"] = shown
    try:
        info = _docker_info(host)
    except _Unknown as unknown:
        return _not_ok("docker", f"{sdk}; {unknown.what}", unknown.advice, details)
    except PermissionError:
        advice = "run the service as root or in the group that owns the socket (docker)"
        return _not_ok("docker", f"{sdk}; {shown} is closed to this user", advice, {**details, "reachable": False})
    except (OSError, http.client.HTTPException, ValueError) as error:
        advice = "start the daemon, or set DOCKER_HOST to its address; only the docker backend needs it"
        found = f"{sdk}; no daemon answers at {shown} ({_kind(error)})"
        return _not_ok("docker", found, advice, {**details, "reachable": False})
    facts = {
        "server": str(info.get("ServerVersion", "")),
        "api": str(info.get("ApiVersion", "")),
        "storage_driver": str(info.get("Driver", "")),
        "cgroup_version": str(info.get("CgroupVersion", "")),
        "system": str(info.get("OSType", "")),
    }
    details |= {"reachable": True, **facts}
    found = f"{sdk}; server {facts['server']}, storage driver {facts['storage_driver']}"
    found += f", cgroup v{facts['cgroup_version'] or '?'}, API {facts['api']}"
    if facts["system"] != "linux":
        return _not_ok("docker", found, f"it runs {facts['system']} containers, but sandboxes need Linux", details)
    if _version(facts["api"]) < _MIN_DOCKER_API:
        return _not_ok("docker", found, "Docker 20.10 or newer is needed", details)
    gvisor = _gvisor(info)
    details["gvisor"] = ", ".join(gvisor)
    found += f", gVisor as {', '.join(gvisor)}" if gvisor else ", no gVisor"
    missing = [
        name
        for name, there in (("cpu", "CpuCfsQuota"), ("memory", "MemoryLimit"), ("pids", "PidsLimit"))
        if not info.get(there)
    ]
    advice = f"without {', '.join(missing)} limits: such limits are refused" if missing else ""
    if details["sdk"] is False:
        return _not_ok("docker", found, "pip install 'penstock-sandbox[docker]'", details)
    return Finding("docker", True, False, found, advice, details)


def _gvisor(info: dict[str, Any]) -> list[str]:
    """Returns the daemon's gVisor runtimes, by the program that each runs: the valid values of docker_runtime."""
    runtimes = info.get("Runtimes")
    found = runtimes.items() if isinstance(runtimes, dict) else ()
    programs = {name: str(it.get("path") or it.get("runtimeType")) for name, it in found if isinstance(it, dict)}
    return sorted(name for name, program in programs.items() if "runsc" in program.rpartition("/")[2])


def _docker_info(host: str) -> dict[str, Any]:
    """Returns a daemon's info. Raises OSError, HTTPException or ValueError if it does not answer, and _Unknown."""
    where = urllib.parse.urlsplit(host)
    if where.scheme not in ("unix", "tcp", "http") or os.environ.get("DOCKER_TLS_VERIFY"):
        raise _Unknown(
            f"{where.scheme or 'this'} address is not tried by this command",
            "run `docker version` to see whether it answers; ListBackends of a running service shows the rest",
        )
    connection: http.client.HTTPConnection
    if where.scheme == "unix":
        connection = _UnixConnection(where.path)
    else:
        connection = http.client.HTTPConnection(where.hostname or "", where.port or 2375, timeout=_CALL_S)
    found: dict[str, Any] = {}
    try:
        for path in ("/version", "/info"):
            connection.request("GET", path, headers={"Host": "docker"})
            answer = connection.getresponse()
            body = answer.read(_BODY_BYTES)
            if answer.status != http.HTTPStatus.OK:
                raise http.client.HTTPException(f"status {answer.status}")
            found |= orjson.loads(body)
    finally:
        connection.close()
    return found


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("docker", timeout=_CALL_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(_CALL_S)
        self.sock.connect(self._path)


# Providers -----------------------------------------------------------------------------------------------------------


def e2b() -> Finding:
    """Its SDK, whether a key is set, and whether the control plane accepts it."""
    key = _value(_SETTING + "E2B_API_KEY", "E2B_API_KEY")
    domain = _value(_SETTING + "E2B_DOMAIN", "E2B_DOMAIN") or "e2b.app"
    address = _value(_SETTING + "E2B_API_URL", "E2B_API_URL") or f"https://api.{domain}"
    needs = "set E2B_API_KEY (or PENSTOCK_SANDBOX_E2B_API_KEY); only the e2b backend needs it"
    headers = {"X-API-KEY": key}
    return _provider("e2b", _sdk("e2b"), key, f"{address.rstrip('/')}/v2/sandboxes?limit=1", headers, needs)


def hf() -> Finding:
    """Its SDK, whether a token is set, and whether Hugging Face accepts it."""
    token = _value(_SETTING + "HF_TOKEN", "HF_TOKEN")
    address = _value("HF_ENDPOINT") or "https://huggingface.co"
    needs = "set HF_TOKEN (or PENSTOCK_SANDBOX_HF_TOKEN); only the hf backend needs it"
    classic = _value(_SETTING + "HF_CLIENT") == "hf-sandbox"
    sdk = _sdk("hf-sandbox" if classic else "huggingface_hub")
    headers = {"Authorization": f"Bearer {token}"}
    return _provider("hf", sdk, token, f"{address.rstrip('/')}/api/whoami-v2", headers, needs)


def kubernetes() -> Finding:
    """Its SDK, whether a warm pool and keys are set, and which API server its kubeconfig or its pod's account names.

    That one is not asked: only the SDK speaks for a kubeconfig, whose user may be a program. A running service is.
    """
    installed, details = _sdk("kubernetes_asyncio")
    pool = _value(_SETTING + "KUBERNETES_WARM_POOL")
    details |= {"warm_pool": pool, "configured": bool(pool)}
    needs = "set PENSTOCK_SANDBOX_KUBERNETES_WARM_POOL and PENSTOCK_SANDBOX_KUBERNETES_KEYS"
    if not pool:
        return _not_ok("kubernetes", f"{installed}; no warm pool", f"{needs}; only this backend needs it", details)
    keys = _value(_SETTING + "KUBERNETES_KEYS")
    absent = [name for name in ("service.pem", "pod.crt") if not (keys and Path(keys, name).is_file())]
    if absent:
        found = f"{installed}; warm pool {pool}; {' and '.join(absent)} not in {keys or 'any directory'}"
        return _not_ok("kubernetes", found, f"{needs} to the directory where the Secret is mounted", details)
    config = _value(_SETTING + "KUBERNETES_CONFIG", "KUBECONFIG")
    where = "the account of its pod" if _value("KUBERNETES_SERVICE_HOST") else config or "~/.kube/config"
    if not _value("KUBERNETES_SERVICE_HOST") and not Path(where).expanduser().is_file():
        found = f"{installed}; warm pool {pool}, its keys; no {where}"
        return _not_ok("kubernetes", found, "set PENSTOCK_SANDBOX_KUBERNETES_CONFIG to a kubeconfig", details)
    found = f"{installed}; warm pool {pool}, its keys; the cluster of {where}, which a running service asks"
    if details["sdk"] is False:
        return _not_ok("kubernetes", found, "pip install 'penstock-sandbox[kubernetes]'", details)
    return Finding("kubernetes", True, False, found, "", details)


def _provider(
    name: str, sdk: tuple[str, dict[str, str | bool]], key: str, url: str, headers: Mapping[str, str], needs: str
) -> Finding:
    """Checks a provider's backend: `headers` carry `key`, `needs` describes how to set it."""
    installed, details = sdk
    shown = _without_user(url).partition("?")[0]
    details |= {"address": shown, "configured": bool(key)}
    if not key:
        return _not_ok(name, f"{installed}; no key", needs, details)
    if not _may_carry_keys(url):
        return _not_ok(
            name, f"{installed}; {shown} is not an https address", "a key is not sent in cleartext: use https", details
        )
    try:
        status = _status(url, headers)
    except (OSError, http.client.HTTPException, ValueError) as error:
        found = f"{installed}; a key; {shown} does not answer ({_kind(error)})"
        return _not_ok(name, found, "check the address and the network", {**details, "reachable": False})
    details["reachable"] = True
    if status in (http.HTTPStatus.UNAUTHORIZED, http.HTTPStatus.FORBIDDEN):
        found = f"{installed}; {shown} answers and does not accept the key (status {status})"
        return _not_ok(name, found, needs.partition(";")[0] + " to one that is valid", {**details, "accepted": False})
    if status != http.HTTPStatus.OK:
        found = f"{installed}; a key; {shown} answers with status {status}"
        return _not_ok(name, found, "check the address, and the provider's state", details)
    found = f"{installed}; {shown} answers and accepts the key"
    details["accepted"] = True
    if details["sdk"] is False:
        return _not_ok(name, found, f"pip install 'penstock-sandbox[{name}]'", details)
    return Finding(name, True, False, found, "", details)


def _status(url: str, headers: Mapping[str, str]) -> int:
    """Returns the status of a GET. Raises OSError, HTTPException or ValueError without one."""
    request = urllib.request.Request(url, headers={"Accept": "application/json", **headers})  # noqa: S310 - checked
    # In clear it stays on this machine; a proxy would see it.
    proxies = urllib.request.ProxyHandler({} if url.startswith("http:") else None)
    try:
        with urllib.request.build_opener(proxies, _NoRedirects).open(request, timeout=_CALL_S) as answer:
            status: int = answer.status
            return status
    except urllib.error.HTTPError as error:
        error.close()
        return error.code


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Refuses redirects: a key is for the address that it was configured for."""

    def redirect_request(self, *_: Any) -> None:
        return None


# Parts ---------------------------------------------------------------------------------------------------------------


class _Unknown(Exception):
    """The backend cannot be examined from here."""

    def __init__(self, what: str, advice: str) -> None:
        super().__init__(what)
        self.what = what
        self.advice = advice


def _not_ok(name: str, found: str, advice: str, details: Mapping[str, str | bool]) -> Finding:
    if details.get("sdk") is False and "pip install" not in advice:
        advice = f"pip install 'penstock-sandbox[{name}]'; {advice}"
    return Finding(name, False, False, found, advice, details)


def _sdk(distribution: str) -> tuple[str, dict[str, str | bool]]:
    """Returns an SDK's version, or that it is not installed, in words and as a detail."""
    try:
        version = importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "SDK not installed", {"sdk": False}
    return f"SDK {version}", {"sdk": version}


def _value(*names: str) -> str:
    """Returns the first of these environment variables that is not empty."""
    return next((value for name in names if (value := os.environ.get(name, "").strip())), "")


def _may_carry_keys(url: str) -> bool:
    where = urllib.parse.urlsplit(url)
    if where.scheme != "http":
        return where.scheme == "https"
    try:
        return where.hostname == "localhost" or ipaddress.ip_address(where.hostname or "").is_loopback
    except ValueError:
        return False


def _without_user(url: str) -> str:
    """Returns an address without user name and password, for display."""
    where = urllib.parse.urlsplit(url)
    if where.scheme == "unix":
        return url
    return urllib.parse.urlunsplit(where._replace(netloc=where.netloc.rpartition("@")[2]))


def _kind(error: Exception) -> str:
    """Describes an error in the system's words: a library's text may contain what was sent."""
    cause = error.reason if isinstance(error, urllib.error.URLError) else error
    if isinstance(cause, TimeoutError):
        return "in time"
    return (cause.strerror if isinstance(cause, OSError) else None) or type(cause).__name__


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".") if part.isdigit())
