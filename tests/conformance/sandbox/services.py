"""The services under the suite: a real `penstock-sandbox` process for each way of running it.

To put a backend under the suite, add a line to SERVICES: a name, and the settings that make it the default backend.
`pytest --backend NAME` (which may be given more than once) runs the whole suite on those alone, `--full` on every one.
What a backend does not declare (`needs`) is not left out: its refusal is proven instead.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from tests.conformance.sandbox.forms import ISOLATION, MANY, OWN_FILE_SYSTEM, SHORT
from tests.support.agent_sandbox import running as agent_sandbox
from tests.support.docker import dockerd, podman
from tests.support.e2b_cloud import running as e2b_cloud
from tests.support.hf_jobs.client import hf_jobs
from tests.support.images import base_image

from penstock.sandbox.v1 import (
    file_service_pb2_grpc,
    process_service_pb2_grpc,
    sandbox_service_pb2_grpc,
    toolbox_service_pb2_grpc,
)
from penstock_chassis.channel import connect

ORDINARY_UID = 61234
TOKEN = "conformance-operator"
LIFETIME_S = 4 * 3600
"""The longest life of a sandbox of the suite: more than a run takes."""
_ROOT = Path(__file__).parents[3]


@dataclass(frozen=True)
class Variant:
    """One way of running the service."""

    settings: Mapping[str, str] = field(default_factory=dict)
    ordinary_user: bool = False
    plugins: Mapping[str, str] = field(default_factory=dict)
    """Backends that are no part of the product: entry point name -> "module:callable" under the repository's root."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Tests that are not run on it, and why, which every run says at its end. Never what it should refuse (`needs`)."""
    left_out_unless_named: Mapping[str, str] = field(default_factory=dict)
    """The same, where neither `--backend` nor `--full` asks: what is slow on it and not its own business."""
    short_form: frozenset[str] = frozenset()
    """Where it is not empty and neither `--backend` nor `--full` asks: the only tests that are run on it (forms.py).
    For one that serves its sandboxes as another does, so that the rest would show the same again."""
    on_demand: str = ""
    """Why it is run only when `--backend` or `--full` asks; every run says so at its end."""
    surroundings: Callable[[], AbstractAsyncContextManager[Mapping[str, str]]] | None = None
    """What must run beside the service while it does, such as a stand-in; yields further environment variables."""

    def leaves_out(self, *, named: bool) -> Mapping[str, str]:
        """The tests that are not run on it, and why; `named` is whether somebody asks for all of it."""
        return self.left_out if named else {**self.left_out, **self.left_out_unless_named}

    def runs(self, test: str, *, named: bool) -> bool:
        """Whether a test is run on it."""
        if not named and self.short_form and test not in self.short_form:
            return False
        return test not in self.leaves_out(named=named)


_ATTENDED = {"attended": "tests.conformance.sandbox.attended_backend:AttendedBackend"}
_OWNER_OUTSIDE = {
    "test_a_file_is_read_with_the_rights_of_the_sandboxs_user": "its attendant acts, from outside, as the owner of the "
    "sandbox's user namespace, whom the kernel lets read its first process; no backend of the product does"
}


@asynccontextmanager
async def _hf_jobs() -> AsyncIterator[Mapping[str, str]]:
    async with hf_jobs() as jobs:
        yield jobs.environment


_HF = {
    "PENSTOCK_SANDBOX_DEFAULT_BACKEND": "hf",
    # Accepted here, so that the endpoint is tried; what it does not keep from a sandbox is no part of its tests.
    "PENSTOCK_SANDBOX_HF_ALLOW_OPEN_EGRESS": "true",
}

SERVICES: Mapping[str, Variant] = {
    "local": Variant({"PENSTOCK_SANDBOX_DEFAULT_BACKEND": "local"}),
    # As most people run it: not root, no control groups of its own.
    "local-ordinary-user": Variant({"PENSTOCK_SANDBOX_DEFAULT_BACKEND": "local"}, ordinary_user=True),
    # The same on an image, from a registry on loopback.
    "local-image": Variant(
        {"PENSTOCK_SANDBOX_DEFAULT_BACKEND": "local"},
        short_form=SHORT,
        surroundings=base_image.pulled,
    ),
    "local-image-ordinary-user": Variant(
        {"PENSTOCK_SANDBOX_DEFAULT_BACKEND": "local"},
        ordinary_user=True,
        short_form=SHORT | ISOLATION,
        surroundings=base_image.pulled,
    ),
    # The example of docs/guides/your-own-backend.md.
    "attended": Variant(
        {"PENSTOCK_SANDBOX_DEFAULT_BACKEND": "attended"},
        plugins=_ATTENDED,
        left_out=_OWNER_OUTSIDE,
        short_form=SHORT - {*_OWNER_OUTSIDE},
    ),
    "attended-armoured": Variant(
        {"PENSTOCK_SANDBOX_DEFAULT_BACKEND": "attended-armoured"},
        plugins={"attended-armoured": "tests.conformance.sandbox.attended_backend:ArmouredBackend"},
        left_out=_OWNER_OUTSIDE,
        on_demand="its pipe is that of e2b and hf-hub, which run",
    ),
    "attended-ordinary-user": Variant(
        {"PENSTOCK_SANDBOX_DEFAULT_BACKEND": "attended"},
        ordinary_user=True,
        plugins=_ATTENDED,
        on_demand="no backend of the product; attended runs, and local as an ordinary user",
    ),
    # Unmodified SDKs against a stand-in of Hugging Face's Jobs (tests/support/hf_jobs says what that does not show).
    "hf-hub": Variant(_HF, short_form=SHORT, surroundings=_hf_jobs),
    "hf-sandbox": Variant(
        {**_HF, "PENSTOCK_SANDBOX_HF_CLIENT": "hf-sandbox", "PYTHONPATH": str(_ROOT / "tests/support/hf_jobs/hasten")},
        on_demand="seconds for each sandbox and each request: more than half an hour in all",
        left_out={
            "test_a_hundred_megabytes_go_in_and_come_out": "a request for every piece: minutes, and the call gives two",
            "test_fifty_sandboxes_at_once_all_work": "eight are made at a time, in seconds each: more than a minute",
            "test_megabytes_pass_the_endpoint_both_ways_and_half_closes_too": "requests for each 256 KiB: "
            "more than the minute that its client waits",
            "test_every_port_of_loopback_but_the_endpoint_is_closed": "the SDK's own server listens on port "
            "8000 of every job; it asks for a token",
        },
        surroundings=_hf_jobs,
    ),
    # The unmodified SDK against a stand-in of E2B's cloud, or E2B itself (see tests/support/e2b_cloud/running.py).
    "e2b": Variant(
        {"PENSTOCK_SANDBOX_DEFAULT_BACKEND": "e2b"},
        left_out_unless_named=dict.fromkeys(MANY, "most of it is the stand-in's work; it runs on local"),
        surroundings=e2b_cloud.beside,
    ),
    # The unmodified client against a stand-in of a cluster with agent-sandbox (see tests/support/agent_sandbox).
    "kubernetes": Variant(
        {"PENSTOCK_SANDBOX_DEFAULT_BACKEND": "kubernetes"}, short_form=SHORT, surroundings=agent_sandbox.beside
    ),
    # A real engine, entered by the service, and by a container beside each sandbox.
    "docker": Variant(
        dockerd.settings("direct"),
        left_out_unless_named=dict.fromkeys(MANY, "most of it is the engine's work; it runs on local"),
        surroundings=dockerd.running,
    ),
    "docker-sidecar": Variant(dockerd.settings("sidecar"), short_form=SHORT | ISOLATION, surroundings=dockerd.running),
    # Podman, through its service for Docker's API.
    "podman": Variant(
        dockerd.settings("direct"),
        on_demand="entered as docker's containers are, which runs; what differs is Podman's answers to the same calls",
        surroundings=podman.running,
    ),
    "podman-sidecar": Variant(
        dockerd.settings("sidecar"),
        on_demand="as podman, reached as docker-sidecar is, which runs",
        surroundings=podman.running,
    ),
    # The same engine with gVisor as the runtime: served from inside.
    "docker-gvisor": Variant(
        dockerd.gvisor_settings(),
        short_form=SHORT | ISOLATION | OWN_FILE_SYSTEM,
        surroundings=dockerd.running_gvisor,
    ),
}


def not_run(asked: Sequence[str], *, full: bool = False) -> list[str]:
    """What a run leaves out and why, a line each; `asked` and `full` are what `--backend` and `--full` say."""
    named = bool(asked) or full
    lines = [] if named else [f"{name}: {one.on_demand}" for name, one in SERVICES.items() if one.on_demand]
    for name in asked or [name for name in SERVICES if full or not SERVICES[name].on_demand]:
        reasons: dict[str, list[str]] = {}
        for test, why in SERVICES[name].leaves_out(named=named).items():
            reasons.setdefault(why, []).append(test)
        lines += [f"{name}: {why} ({', '.join(tests)})" for why, tests in reasons.items()]
        if SERVICES[name].short_form and not named:
            lines.append(f"{name}: all but a short form of {len(SERVICES[name].short_form)} tests (forms.py)")
    return lines


@dataclass
class Running:
    """A service that runs, and its stubs."""

    name: str
    state_dir: Path
    process: subprocess.Popen[bytes]
    address: str
    channel: grpc.aio.Channel

    def __post_init__(self) -> None:
        self.sandboxes = sandbox_service_pb2_grpc.SandboxServiceStub(self.channel)
        self.processes = process_service_pb2_grpc.ProcessServiceStub(self.channel)
        self.files = file_service_pb2_grpc.FileServiceStub(self.channel)
        self.toolboxes = toolbox_service_pb2_grpc.ToolboxServiceStub(self.channel)


@asynccontextmanager
async def start(name: str, **settings: str) -> AsyncIterator[Running]:
    """Start a service on a state directory of its own; settings are environment variables without their prefix."""
    # Not pytest's tmp_path: that is closed to other users than the one who runs the tests.
    with tempfile.TemporaryDirectory(prefix="penstock-conformance-", ignore_cleanup_errors=True) as folder:
        state_dir = Path(folder)
        if SERVICES[name].ordinary_user and os.geteuid() == 0:
            state_dir.chmod(0o755)
            os.chown(state_dir, ORDINARY_UID, ORDINARY_UID)
        async with start_on(state_dir, name, **settings) as running:
            yield running


@asynccontextmanager
async def start_on(state_dir: Path, name: str, **settings: str) -> AsyncIterator[Running]:
    """Start a service on the given state directory; it is stopped at the end, however it is by then."""
    variant = SERVICES[name]
    async with AsyncExitStack() as stack:
        beside = await stack.enter_async_context(variant.surroundings()) if variant.surroundings is not None else {}
        yield await stack.enter_async_context(
            start_variant(state_dir, name, variant, {**beside, **_prefixed(settings)})
        )


def _prefixed(settings: Mapping[str, str]) -> dict[str, str]:
    return {f"PENSTOCK_SANDBOX_{key.upper()}": value for key, value in settings.items()}


@asynccontextmanager
async def start_variant(
    state_dir: Path, name: str, variant: Variant, further: Mapping[str, str]
) -> AsyncIterator[Running]:
    """Start a variant's service among surroundings that are there; `further` are environment variables."""
    environment = {
        "PATH": os.environ.get("PATH", "/usr/bin:/bin"),
        "HOME": str(state_dir),
        "PENSTOCK_SANDBOX_PORT": "0",
        "PENSTOCK_SANDBOX_OPERATOR_TOKEN": TOKEN,
        "PENSTOCK_SANDBOX_STATE_DIR": str(state_dir / "state"),
        "PENSTOCK_SANDBOX_LOG_LEVEL": "warning",
        "PENSTOCK_SANDBOX_STOP_S": "1",
        "PENSTOCK_SANDBOX_MAX_LIFETIME_S": str(LIFETIME_S),
        "PENSTOCK_SANDBOX_ALLOWED_UPSTREAMS": '["127.0.0.1:*", "unix:/tmp/*"]',
        # A marker that no sandbox may ever see (R12).
        "PENSTOCK_CONFORMANCE_HOST_SECRET": "sk-host-secret",
        **variant.settings,
        **further,
    }
    if variant.plugins:
        environment["PYTHONPATH"] = f"{_plugins(state_dir, variant)}:{_ROOT}"
    process = subprocess.Popen(
        _command(variant), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, env=environment, cwd="/"
    )
    try:
        assert process.stdout is not None
        line = await asyncio.to_thread(process.stdout.readline)
        assert line, f"the service did not start (exit {process.wait()})"
        address = json.loads(line)["address"]
        async with connect(address, TOKEN) as channel:
            yield Running(name, state_dir, process, address, channel)
    except BaseException as error:
        if process.poll() is not None:
            error.add_note(f"the service {name} had ended before: exit {process.returncode}")
        raise
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        await asyncio.to_thread(process.wait, 60)
        assert process.stdout is not None
        process.stdout.close()


def _plugins(state_dir: Path, variant: Variant) -> Path:
    """A directory that, on the path, is an installed distribution with the variant's entry points."""
    folder = state_dir / "plugins"
    metadata = folder / "penstock_conformance-0.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: penstock-conformance\nVersion: 0\n")
    lines = [f"{name} = {target}" for name, target in variant.plugins.items()]
    (metadata / "entry_points.txt").write_text("\n".join(["[penstock.sandbox.backends]", *lines, ""]))
    return folder


def _command(variant: Variant) -> Sequence[str]:
    if not variant.ordinary_user or os.geteuid() != 0:
        return [sys.executable, "-m", "penstock_sandbox"]
    return [sys.executable, str(Path(__file__).with_name("as_ordinary_user.py")), str(ORDINARY_UID)]
