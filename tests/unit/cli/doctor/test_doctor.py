"""What `penstock doctor` says of backends that are elsewhere: a daemon at a socket, a provider at an address."""

import importlib.metadata
import threading
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer
from pathlib import Path
from socketserver import ThreadingUnixStreamServer
from typing import Any

import orjson
import pytest
from tests.support.waiting import limits

from penstock.cli.commands.doctor import backends
from penstock.cli.commands.doctor.findings import Finding

KEY = "sk-test '$(leak)"
Route = Callable[[Mapping[str, str]], tuple[int, Mapping[str, str], Any]]


class Wire:
    """An HTTP server of a test; every request is remembered with its headers."""

    def __init__(self, server: HTTPServer | ThreadingUnixStreamServer, routes: dict[str, Route]) -> None:
        self.server = server
        self.routes = routes
        self.asked: list[tuple[str, dict[str, str]]] = []
        self.thread = threading.Thread(target=server.serve_forever, daemon=True)
        self.thread.start()

    @property
    def address(self) -> str:
        assert isinstance(self.server, HTTPServer)
        return f"http://127.0.0.1:{self.server.server_port}"

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


def handler(wire: Callable[[], Wire]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def address_string(self) -> str:
            return "test"  # a Unix socket's peer has none

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
            return

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            wire().asked.append((self.path, dict(self.headers)))
            status, headers, body = wire().routes.get(path, _nothing)(dict(self.headers))
            text = orjson.dumps(body)
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(text))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(text)

    return Handler


def _nothing(_: Mapping[str, str]) -> tuple[int, Mapping[str, str], Any]:
    return 404, {}, {}


def serve(routes: dict[str, Route], socket: Path | None = None) -> Wire:
    box: list[Wire] = []
    kind = handler(lambda: box[0])
    server: HTTPServer | ThreadingUnixStreamServer
    if socket is not None:
        server = ThreadingUnixStreamServer(str(socket), kind)  # type: ignore[arg-type, unused-ignore]
    else:
        server = ThreadingHTTPServer(("127.0.0.1", 0), kind)
    box.append(Wire(server, routes))
    return box[0]


@pytest.fixture
def wire() -> Iterator[Callable[..., Wire]]:
    """Makes servers that end with the test."""
    made: list[Wire] = []

    def make(routes: dict[str, Route], socket: Path | None = None) -> Wire:
        made.append(serve(routes, socket))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """No backend is configured by whoever runs the tests."""
    for name in ("E2B_API_KEY", "E2B_API_URL", "E2B_DOMAIN", "HF_TOKEN", "HF_ENDPOINT", "DOCKER_HOST", "KUBECONFIG"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(f"PENSTOCK_SANDBOX_{name}", raising=False)
    for name in ("DOCKER_TLS_VERIFY", "KUBERNETES_SERVICE_HOST", "PENSTOCK_SANDBOX_KUBERNETES_WARM_POOL"):
        monkeypatch.delenv(name, raising=False)


def told(finding: Finding) -> str:
    return orjson.dumps([finding.found, finding.advice, dict(finding.details)]).decode()


def takes(name: str, value: str) -> Route:
    """Answers who shows the right key."""
    return lambda headers: (200, {}, []) if headers.get(name) == value else (401, {}, {"message": f"not {headers}"})


@pytest.mark.requirement("R8", "R11")
def test_accepted_and_refused_keys_differ_and_neither_is_shown(
    wire: Callable[..., Wire], monkeypatch: pytest.MonkeyPatch
) -> None:
    for look, path, header, variable, address, value in (
        (backends.e2b, "/v2/sandboxes", "X-Api-Key", "E2B_API_KEY", "E2B_API_URL", KEY),
        (backends.hf, "/api/whoami-v2", "Authorization", "HF_TOKEN", "HF_ENDPOINT", f"Bearer {KEY}"),
    ):
        provider = wire({path: takes(header, value)})
        monkeypatch.setenv(address, provider.address)
        missing = look()
        assert not missing.ok and variable in missing.advice and missing.details["configured"] is False
        assert provider.asked == [], "nothing is asked without a key"
        monkeypatch.setenv(variable, KEY)
        good = look()
        assert good.ok and good.details["accepted"] is True and good.details["sdk"], good
        monkeypatch.setenv(variable, KEY + "x")
        bad = look()
        assert not bad.ok and bad.details["accepted"] is False and variable in bad.advice
        for finding in (missing, good, bad):
            assert "sk-test" not in told(finding)


@pytest.mark.requirement("R11")
def test_a_key_goes_nowhere_else(wire: Callable[..., Wire], monkeypatch: pytest.MonkeyPatch) -> None:
    """Not after a redirect, not to a proxy, not in clear beyond this machine, and no error repeats it."""
    elsewhere = wire({"/": lambda _: (200, {}, [])})
    provider = wire({"/v2/sandboxes": lambda _: (302, {"Location": elsewhere.address + "/"}, [])})
    monkeypatch.setenv("E2B_API_KEY", KEY)
    monkeypatch.setenv("http_proxy", elsewhere.address)
    monkeypatch.setenv("E2B_API_URL", provider.address)
    moved = backends.e2b()
    assert not moved.ok and "302" in moved.found
    monkeypatch.setenv("E2B_API_URL", "http://e2b.example")
    clear = backends.e2b()
    assert not clear.ok and "https" in clear.advice
    assert elsewhere.asked == [] and len(provider.asked) == 1
    monkeypatch.setenv("E2B_API_URL", provider.address.replace("//", "//user:hunter2@"))
    monkeypatch.setenv("E2B_API_KEY", f"{KEY}\nX-Other: 1")
    for finding in (moved, clear, backends.e2b()):
        assert not finding.ok and "sk-test" not in told(finding) and "hunter2" not in told(finding)


@pytest.mark.requirement("R41")
def test_an_answer_that_does_not_come_is_not_waited_for(
    wire: Callable[..., Wire], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each is told as it is, the others beside it."""
    over = threading.Event()

    def silent(_: Mapping[str, str]) -> tuple[int, Mapping[str, str], Any]:
        over.wait()
        return 200, {}, []

    monkeypatch.setattr(backends, "_CALL_S", 3600.0)
    monkeypatch.setenv("PENSTOCK_CONNECTION", str(tmp_path / "none.json"))
    monkeypatch.setenv("E2B_API_KEY", KEY)
    monkeypatch.setenv("E2B_API_URL", wire({"/v2/sandboxes": silent}).address)
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    found: dict[str, Finding] = {}
    try:
        for limit in limits(0.2):  # the others have to answer within it
            monkeypatch.setattr(backends, "_LIMIT_S", limit)
            found = {finding.name: finding for finding in backends.look_at_backends()}
            if found["docker"].details and found["hf"].details:
                break
    finally:
        over.set()
    assert "in time" in found["e2b"].found and not found["e2b"].ok
    assert found["docker"].details["reachable"] is False and "HF_TOKEN" in found["hf"].advice


@pytest.mark.requirement("R48", "R55")
def test_a_daemon_is_asked_for_what_its_sandboxes_depend_on(
    wire: Callable[..., Wire], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Version, storage driver, control groups and gVisor; what is missing is said with what follows."""
    info: dict[str, Any] = {"Driver": "overlay2", "CgroupVersion": "2", "OSType": "linux"}
    info |= {"MemoryLimit": True, "CpuCfsQuota": True, "PidsLimit": True, "ServerVersion": "27.3.1"}
    version = {"Version": "27.3.1", "ApiVersion": "1.47"}
    wire(
        {"/info": lambda _: (200, {}, info), "/version": lambda _: (200, {}, version)}, socket=tmp_path / "docker.sock"
    )
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/docker.sock")
    good = backends.docker()
    assert good.ok and not good.advice
    expected = {"server": "27.3.1", "storage_driver": "overlay2", "cgroup_version": "2", "reachable": True}
    assert expected.items() <= dict(good.details).items()
    assert "27.3.1" in good.found and "overlay2" in good.found and "cgroup v2" in good.found
    assert "no gVisor" in good.found and good.details["gvisor"] == ""
    info["Runtimes"] = {"runc": {"path": "runc"}, "sealed": {"path": "/usr/bin/runsc"}}
    info["Runtimes"]["new"] = {"runtimeType": "io.containerd.runsc.v1"}
    assert "gVisor as new, sealed" in backends.docker().found
    info["PidsLimit"] = False
    assert backends.docker().ok and "pids" in backends.docker().advice
    version["ApiVersion"] = "1.40"
    assert not backends.docker().ok
    version["ApiVersion"], info["OSType"] = "1.47", "windows"
    assert not backends.docker().ok


@pytest.mark.requirement("R8", "R48")
@pytest.mark.parametrize("address", ["ssh://me:hunter2@host", "tcp://127.0.0.1:1", "nonsense", "unix:///nowhere"])
def test_unreachable_daemon_is_reported_with_the_fix(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", address)
    finding = backends.docker()
    assert not finding.ok and finding.advice and "hunter2" not in told(finding)


@pytest.mark.requirement("R48")
def test_a_missing_sdk_is_named_with_what_installs_it(
    wire: Callable[..., Wire], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", _no_distribution)
    provider = wire({"/v2/sandboxes": takes("X-Api-Key", KEY)})
    monkeypatch.setenv("E2B_API_URL", provider.address)
    for key in ("", KEY):
        monkeypatch.setenv("E2B_API_KEY", key)
        finding = backends.e2b()
        assert not finding.ok and "pip install 'penstock-sandbox[e2b]'" in finding.advice
        assert finding.details["sdk"] is False
    assert "penstock-sandbox[docker]" in backends.docker().advice


def _no_distribution(name: str) -> str:
    raise importlib.metadata.PackageNotFoundError(name)


@pytest.mark.requirement("R48", "R53")
def test_kubernetes_needs_pool_keys_and_a_cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each missing one is named with its setting."""
    monkeypatch.setenv("HOME", str(tmp_path))
    assert "KUBERNETES_WARM_POOL" in backends.kubernetes().advice
    monkeypatch.setenv("PENSTOCK_SANDBOX_KUBERNETES_WARM_POOL", "penstock")
    assert "service.pem and pod.crt" in backends.kubernetes().found
    monkeypatch.setenv("PENSTOCK_SANDBOX_KUBERNETES_KEYS", str(tmp_path))
    for name in ("service.pem", "pod.crt"):
        (tmp_path / name).touch()
    assert "KUBERNETES_CONFIG" in backends.kubernetes().advice
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    assert backends.kubernetes().ok
    monkeypatch.setattr(importlib.metadata, "version", _no_distribution)
    assert "penstock-sandbox[kubernetes]" in backends.kubernetes().advice
