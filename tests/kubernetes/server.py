"""Starts etcd, the API server and the controllers on loopback; speaks to them by kubectl and Helm."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tests.kubernetes.build import programs
from tests.support.endpoints.loopback import unused_port

from tools import helm

GUARD_S: Final = 120.0
"""A guard against a hang, not an expectation."""

CONTROLLERS: Final = (
    "statefulset,endpoint,endpointslice,disruption,garbagecollector,pvc-protection,clusterrole-aggregation"
)
"""Those that have to do with the chart. No scheduler and no kubelet: pods are bound and made ready by the checks."""

USERS: Final = {"admin": "system:masters", "installer": "", "nobody": ""}


@dataclass(frozen=True)
class Cluster:
    """A running API server."""

    folder: Path

    def kubectl(self, *words: str, user: str = "admin", data: str | None = None, check: bool = True) -> str:
        """Runs kubectl; returns what it printed. Raises AssertionError with what it said."""
        return self._run(helm.program("kubectl"), words, user, data, check)

    def helm(self, *words: str, user: str = "admin", program: str = "helm", data: str | None = None) -> str:
        """Runs Helm; returns what it printed. Raises AssertionError with what it said."""
        return self._run(helm.program(program), words, user, data, True)

    def get(self, *words: str) -> Any:
        """What kubectl gets, as values."""
        return json.loads(self.kubectl("get", *words, "-o", "json"))

    def eventually(self, holds: Callable[[], bool], what: str) -> None:
        """Returns once `holds`; AssertionError after GUARD_S."""
        deadline = time.monotonic() + GUARD_S
        while not holds():
            assert time.monotonic() < deadline, f"{what}: not within {GUARD_S:g} s"
            time.sleep(0.2)

    def _run(self, program: Path, words: tuple[str, ...], user: str, data: str | None, check: bool) -> str:
        environment = {**os.environ, "KUBECONFIG": str(self.folder / f"{user}.json"), "HOME": str(self.folder)}
        done = subprocess.run(
            [str(program), *words], input=data, capture_output=True, text=True, env=environment, check=False
        )
        assert not check or done.returncode == 0, f"{program.name} {' '.join(words)}: {done.stderr}"
        return done.stdout if check else done.stdout + done.stderr


@contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    """A cluster whose state and logs are in this folder, until the block ends."""
    found = programs()
    etcd, peer, port = (unused_port() for _ in range(3))
    _keys(folder)
    for user in USERS:
        (folder / f"{user}.json").write_text(json.dumps(_config(port, user)), encoding="utf-8")
    (folder / "tokens.csv").write_text(
        "".join(f'{user}-token,{user},{user},"{group}"\n' for user, group in USERS.items()), encoding="utf-8"
    )
    store = f"http://127.0.0.1:{etcd}"
    with ExitStack() as stack:
        stack.enter_context(
            _process(folder, "etcd", [
                str(found / "etcd"), f"--data-dir={folder / 'etcd'}", f"--listen-client-urls={store}",
                f"--advertise-client-urls={store}", f"--listen-peer-urls=http://127.0.0.1:{peer}",
                f"--initial-advertise-peer-urls=http://127.0.0.1:{peer}",
                f"--initial-cluster=default=http://127.0.0.1:{peer}",
            ])
        )  # fmt: skip
        stack.enter_context(
            _process(folder, "kube-apiserver", [
                str(found / "kube-apiserver"), f"--etcd-servers={store}", f"--cert-dir={folder / 'certificates'}",
                "--bind-address=127.0.0.1", "--advertise-address=127.0.0.1", f"--secure-port={port}",
                "--service-cluster-ip-range=10.0.0.0/24", "--authorization-mode=RBAC", "--allow-privileged=true",
                f"--token-auth-file={folder / 'tokens.csv'}",
                "--service-account-issuer=https://kubernetes.default.svc",
                f"--service-account-signing-key-file={folder / 'accounts.key'}",
                f"--service-account-key-file={folder / 'accounts.key'}",
            ])
        )  # fmt: skip
        started = Cluster(folder)
        started.eventually(lambda: started.kubectl("get", "--raw", "/readyz", check=False) == "ok", "the API server")
        stack.enter_context(
            _process(folder, "kube-controller-manager", [
                str(found / "kube-controller-manager"), f"--kubeconfig={folder / 'admin.json'}", "--port=0",
                "--secure-port=0", "--leader-elect=false", f"--controllers={CONTROLLERS}",
            ])
        )  # fmt: skip
        yield started


@contextmanager
def _process(folder: Path, name: str, command: list[str]) -> Iterator[None]:
    with (folder / f"{name}.log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            yield
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


def _config(port: int, user: str) -> Mapping[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [
            {"name": "it", "cluster": {"server": f"https://127.0.0.1:{port}", "insecure-skip-tls-verify": True}}
        ],
        "users": [{"name": user, "user": {"token": f"{user}-token"}}],
        "contexts": [{"name": "it", "context": {"cluster": "it", "user": user}}],
        "current-context": "it",
    }


def _keys(folder: Path) -> None:
    from cryptography.hazmat.primitives.asymmetric import rsa
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    (folder / "accounts.key").write_bytes(
        key.private_bytes(Encoding.PEM, PrivateFormat.TraditionalOpenSSL, NoEncryption())
    )
