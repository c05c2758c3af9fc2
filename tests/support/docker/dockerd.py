"""A real Docker engine for tests: started by hand with a data root of its own, with images that no registry gave.

One engine a session, started by the first test that asks, stopped by ``stop`` at its end. It has no bridge and touches
no packet filter, so it leaves nothing behind. A machine that cannot run one says so: a failure where CI is set.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import tarfile
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tests.support.absent import absent
from tests.support.docker import base_images
from tests.support.docker.base_images import which

BASE: Final = "penstock-test/debian:1"
"""Debian with Python and bash."""
GVISOR_BROKEN: Final = "runsc-broken"
"""gVisor asked for a network that it cannot have: its containers fail as they start, and leave their processes."""
GVISOR_BASE: Final = "penstock-test/debian-gvisor:1"
"""BASE with others in the place of coreutils' `ls` and `stat`, which ask for what Debian 12's gVisor refuses
(AT_NO_AUTOMOUNT)."""
DATABASE: Final = "penstock-test/postgresql:1"
"""Debian with PostgreSQL; see `with_database`."""
TINY: Final = "penstock-test/busybox:1"
"""One static program and its names: neither Python nor bash."""

NOTED: Final = "noted"
"""A runtime beside the engine's own: runc, which notes what it is asked in `Engine.runtime_log`."""
GVISOR: Final = "runsc"
"""gVisor, where this machine has it (`gvisor` says so)."""
ELSEWHERE: Final = "elsewhere"
"""A runtime whose containers' processes are not this machine's, as with gVisor and Kata: what shows is another's."""

_NEEDED = ("dockerd", "containerd", "runc", "debootstrap", "busybox")
_ADVICE = "apt-get install -y --no-install-recommends docker.io debootstrap busybox-static"
_READY_S = 60.0
_LOG_LINES = 30
_GVISOR_ADVICE = "apt-get install -y --no-install-recommends runsc"
# It needs no kernel module, and no network of its own: sandboxes have none but their endpoint.
_GVISOR_ARGUMENTS = ("--platform=ptrace", "--network=none")
_ELSEWHERE = r"""
for word in "$@"; do
  [ "$before" = --bundle ] && sed -i 's#"/opt/penstock/hold"#"/bin/sleep","1000"#' "$word/config.json"
  before=$word
done
"""


@dataclass
class Engine:
    """A running engine."""

    folder: Path
    process: subprocess.Popen[bytes]
    api: Any

    @property
    def runtime_log(self) -> str:
        """What NOTED was asked for, a line each."""
        log = self.folder / f"{NOTED}.log"
        return log.read_text() if log.exists() else ""

    def emptied(self) -> None:
        """Remove its containers, before its end."""
        for one in self.api.containers(all=True):
            self.api.remove_container(one["Id"], force=True, v=True)

    @property
    def host(self) -> str:
        """What DOCKER_HOST is for it."""
        return f"unix://{self.folder}/docker.sock"

    def remains(self, label: str = "penstock.instance") -> list[str]:
        """Everything of ours that the engine still has: containers, volumes and images with the label."""
        found = self.api.containers(all=True, filters={"label": [label]})
        names = [f"container {one['Names']}: {one['Status']}" for one in found]
        names += [f"volume {one['Name']}" for one in self.api.volumes(filters={"label": [label]}).get("Volumes") or []]
        for image in self.api.images(filters={"label": [label]}):
            # Prepared images are a cache; theirs is empty.
            if image["Labels"].get(label):
                # Podman gives them a registry.
                names.append(f"image {[name.removeprefix('docker.io/library/') for name in image['RepoTags'] or ()]}")
        if label == "penstock.instance":
            # With whatever label: an image may declare some of its own.
            names = [name for name in names if not name.startswith("volume ")]
            names += [f"volume {one['Name']}" for one in self.api.volumes().get("Volumes") or []]
        own = ("host", "none", "podman", "bridge")
        names += [f"network {one['Name']}" for one in self.api.networks() if one["Name"] not in own]
        return names

    @contextlib.contextmanager
    def watched(self) -> Iterator[set[str]]:
        """The ids of all containers that are made meanwhile, those that are gone again included."""
        stream = self.api.events(filters={"type": "container", "event": "create"}, decode=True)
        made: set[str] = set()

        def watch() -> None:
            for event in stream:
                made.add(event["id"])

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            yield made
        finally:
            stream.close()
            thread.join()

    def traces(self, containers: set[str]) -> list[str]:
        """What this machine's kernel still has of containers: control groups, their supervisors, mounts."""
        found = []
        for folder, names, _ in os.walk("/sys/fs/cgroup"):
            found += [f"control group {folder}/{name}" for name in names if name in containers]
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                arguments = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
                found += [f"process {arguments}" for argument in arguments if argument in containers]
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            point = line.split()[4]
            # One of the layers' driver itself is there as long as the engine.
            if point.startswith((f"{self.folder}/data/overlay2/", f"{self.folder}/exec/netns/")):
                found.append(f"mount {point}")
        return found


_engines: dict[str, Engine] = {}
"""Those of the session, by the name of their program; `podman` has one too."""


def engine() -> Engine:
    """The session's engine, started where it is not. Skips, or fails where CI is set, when this machine has none."""
    return once("dockerd", _start)


def once(name: str, start: Callable[[], Engine]) -> Engine:
    """An engine of the session by its name."""
    if name not in _engines:
        _engines[name] = start()
    return _engines[name]


def gvisor() -> Engine:
    """The same with gVisor as GVISOR, and GVISOR_BASE; the same where this machine has none."""
    found = engine()
    if which("runsc") is None:
        absent(f"THE DOCKER BACKEND IS NOT TESTED WITH GVISOR HERE: no runsc: {_GVISOR_ADVICE}")
    if not found.api.images(name=GVISOR_BASE):
        with tarfile.open(fileobj=(archive := io.BytesIO()), mode="w") as made:
            for name in ("ls", "stat"):
                made.add(which("busybox") or "busybox", f"usr/local/bin/{name}")
        container = found.api.create_container(BASE, "-", labels={})["Id"]
        archive.seek(0)
        found.api.put_archive(container, "/", archive)
        repository, _, tag = GVISOR_BASE.partition(":")
        found.api.commit(container, repository, tag)
        found.api.remove_container(container)
    return found


def with_database() -> Engine:
    """The session's engine with DATABASE."""
    found = engine()
    if not found.api.images(name=DATABASE):
        put_image(found, DATABASE, base_images.database())
    return found


def kill(sandbox_id: str) -> bool:
    """Kill a sandbox's container, if an engine of the session has it."""
    for one in _engines.values():
        found = one.api.containers(filters={"label": [f"penstock.sandbox={sandbox_id}"], "status": ["running"]})
        for container in found:
            one.api.kill(container["Id"])
        if found:
            return True
    return False


@contextlib.contextmanager
def nothing_left() -> Iterator[None]:
    """What is made with the session's engines meanwhile is gone at the end. What another test left is its own fault."""
    before = {name: set(one.remains()) for name, one in _engines.items()}
    yield
    for name, one in _engines.items():
        if name in before:
            left = [thing for thing in one.remains() if thing not in before[name]]
            log = (one.folder / "log").read_text(errors="replace").splitlines()[-_LOG_LINES:] if left else []
            assert left == [], "\n".join([f"{left} left with {name}, whose log ends with", *log])


def stop() -> None:
    """End the session's engines, if there are any, and remove all that they made."""
    while _engines:
        _, stopped = _engines.popitem()
        stopped.api.close()
        stopped.emptied()
        _end(stopped.process, stopped.folder)


def _start() -> Engine:
    missing = [name for name in _NEEDED if which(name) is None]
    problem = f"no {', '.join(missing)}: {_ADVICE}" if missing else ""
    if os.geteuid() != 0:
        problem = "an engine of its own needs root"
    if problem:
        absent(f"THE DOCKER BACKEND IS NOT TESTED HERE: {problem}")
    # A short path: it holds sockets, whose names are limited.
    folder = Path(tempfile.mkdtemp(prefix="pd-"))
    folder.chmod(0o755)
    argv = [which("dockerd") or "dockerd", "--data-root", str(folder / "data"), "--exec-root", str(folder / "exec")]
    argv += ["--pidfile", str(folder / "pid"), "-H", f"unix://{folder}/docker.sock"]
    argv += ["--bridge", "none", "--iptables=false", "--ip6tables=false"]
    for name, body in ((NOTED, f'echo "$*" >> {folder}/{NOTED}.log'), (ELSEWHERE, _ELSEWHERE)):
        program = folder / name
        program.write_text(f'#!/bin/sh\n{body}\nexec runc "$@"\n')
        program.chmod(0o755)
        argv += ["--add-runtime", f"{name}={program}"]
    if (runsc := which("runsc")) is not None:
        configuration = folder / "daemon.json"
        runtimes = {GVISOR: {"path": runsc, "runtimeArgs": list(_GVISOR_ARGUMENTS)}, GVISOR_BROKEN: {"path": runsc}}
        configuration.write_text(json.dumps({"runtimes": runtimes}))
        argv += ["--config-file", str(configuration)]
    return begin(folder, argv, {})


def begin(folder: Path, argv: Sequence[str], further: Mapping[str, str]) -> Engine:
    """Start an engine that listens on `docker.sock` of its folder, and give it the tests' images. `further` are
    environment variables.
    """
    import docker

    log = folder / "log"
    environment = {**os.environ, "PATH": f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin", **further}
    with log.open("wb") as output:
        # Podman's monitor leaves a file in its working directory where a container exceeds its memory.
        process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment, cwd=folder
        )
    try:
        api = docker.APIClient(base_url=f"unix://{folder}/docker.sock", version="1.41", timeout=120)
        deadline = time.monotonic() + _READY_S
        while True:
            with contextlib.suppress(Exception):
                api.ping()
                break
            if process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"{argv[0]} did not start:\n{log.read_text(errors='replace')[-4000:]}")
            time.sleep(0.05)
        made = Engine(folder, process, api)
        put_image(made, BASE, base_images.base())
        tiny = folder / "tiny.tar"
        base_images.write_tiny(tiny)
        put_image(made, TINY, tiny)
    except BaseException:
        _end(process, folder)
        raise
    return made


def put_image(made: Engine, name: str, archive: Path) -> None:
    """Give an engine an image of a tar of files."""
    repository, _, tag = name.partition(":")
    with archive.open("rb") as content:
        made.api.import_image_from_data(
            content, repository=repository, tag=tag, changes=["ENV PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"]
        )
    # Podman takes no tag.
    if not made.api.images(name=name):
        made.api.tag(f"{repository}:latest", repository, tag)
        made.api.remove_image(f"{repository}:latest")


def _end(process: subprocess.Popen[bytes], folder: Path) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(30)
    # Podman's containers clean up after themselves in processes of their own, which would make its mounts again.
    deadline = time.monotonic() + _READY_S
    while _used(folder) and time.monotonic() < deadline:
        time.sleep(0.05)
    for line in reversed(Path("/proc/self/mountinfo").read_text().splitlines()):
        point = line.split()[4]
        if point.startswith(f"{folder}/"):
            subprocess.run(["umount", "-l", point], check=False)
    shutil.rmtree(folder, ignore_errors=True)


def _used(folder: Path) -> bool:
    """Whether a process has a path of an engine's folder in its arguments."""
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if f"{folder}/".encode() in process.read_bytes():
                return True
    return False


# Services on it -------------------------------------------------------------------------------------------------------


def settings(reach: str) -> dict[str, str]:
    """The settings of a service whose default backend is Docker, reached in one of the two ways."""
    chosen = {"DEFAULT_BACKEND": "docker", "DOCKER_IMAGE": BASE, "DOCKER_SIDECAR_IMAGE": BASE, "DOCKER_REACH": reach}
    return {f"PENSTOCK_SANDBOX_{name}": value for name, value in chosen.items()}


def gvisor_settings() -> dict[str, str]:
    """The settings of a service whose default backend is Docker with gVisor."""
    return {
        **settings("auto"),
        "PENSTOCK_SANDBOX_DOCKER_RUNTIME": GVISOR,
        "PENSTOCK_SANDBOX_DOCKER_IMAGE": GVISOR_BASE,
    }


@contextlib.asynccontextmanager
async def running_gvisor() -> AsyncIterator[Mapping[str, str]]:
    """The session's engine with gVisor beside a service, as its settings name it."""
    yield {"PENSTOCK_SANDBOX_DOCKER_HOST": (await asyncio.to_thread(gvisor)).host}


@contextlib.asynccontextmanager
async def running() -> AsyncIterator[Mapping[str, str]]:
    """The session's engine beside a service, as its settings name it."""
    yield {"PENSTOCK_SANDBOX_DOCKER_HOST": (await asyncio.to_thread(engine)).host}


def build(name: str, *lines: str) -> None:
    """An image of the session's engine from the lines of a Dockerfile, which needs no other file and no network."""
    text = "\n".join(lines).encode()
    for said in engine().api.build(fileobj=io.BytesIO(text), tag=name, rm=True, forcerm=True, decode=True):
        assert "error" not in said, said["error"]
