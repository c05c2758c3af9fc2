"""The proxy as the service has it: its process, and what a sandbox needs to use it.

Invariants: the process ends with the service; if it ends by itself it is started again, and connections that are made
meanwhile fail; its socket and its store are the service user's alone.
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.util
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import structlog

from penstock_chassis.aio.retry import Backoff, Delays
from penstock_chassis.aio.tasks import TaskOwner
from penstock_chassis.errors import FailedPrecondition
from penstock_sandbox.domain import paths
from penstock_sandbox.domain.backend import MountedToolbox
from penstock_sandbox.domain.model import DEFAULT_PORTS, NetworkKind, NetworkPolicy, Sandbox
from penstock_sandbox.egress.greeting import Greeting

_NEEDED: Final = ("cryptography", "h11")
_START_S: Final = 60.0
_STOP_S: Final = 10.0
_MOUNT: Final = f"{paths.OURS}/egress"
_BUNDLE: Final = f"{_MOUNT}/ca.pem"
_CERTIFICATES: Final = (
    *("SSL_CERT_FILE", "CURL_CA_BUNDLE", "REQUESTS_CA_BUNDLE", "PIP_CERT", "NODE_EXTRA_CA_CERTS"),
    *("npm_config_cafile", "GIT_SSL_CAINFO", "CARGO_HTTP_CAINFO", "AWS_CA_BUNDLE", "DENO_CERT"),
)
_UNPROXIED: Final = "localhost,127.0.0.1,::1"
_S3: Final = "s3://"
_STORE: Final = ("AWS_", "FSSPEC_")
"""How the variables begin that lead s3fs to its bucket, and give it credentials; HOME has its files."""
_RESTARTS: Final = Delays(0.1, 10.0)

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class EgressOptions:
    """``folder`` is the proxy's own, ``trust`` is mounted in sandboxes."""

    folder: Path
    trust: Path
    private: tuple[str, ...]
    netrc: Path | None
    ca: Path | None
    tokens: Mapping[str, str] = field(repr=False)
    store_bytes: int
    max_object_bytes: int
    timeout_s: float
    recordings: str = ""
    """URL of those that services share."""


class Egress:
    """Runs the proxy from ``open`` to ``aclose``."""

    def __init__(self, options: EgressOptions) -> None:
        self._options = options
        self._socket = options.folder / "proxy.sock"
        self._process: asyncio.subprocess.Process | None = None
        self._tasks = TaskOwner()
        self.restarted = asyncio.Event()
        """Set once the proxy ended by itself and listens again."""

    async def open(self) -> None:
        """Starts the proxy and writes the certificate that sandboxes trust.

        Raises FailedPrecondition (EGRESS_MISSING, EGRESS_FAILED, EGRESS_RECORDINGS_UNUSABLE).
        """
        if self._options.recordings.startswith(_S3) and importlib.util.find_spec("s3fs") is None:
            raise FailedPrecondition(
                "egress_recordings is on S3, and s3fs is not installed: pip install penstock-sandbox[egress,s3]",
                reason="EGRESS_MISSING",
            )
        if missing := [name for name in _NEEDED if importlib.util.find_spec(name) is None]:
            raise FailedPrecondition(
                f"egress_hosts is set, and {', '.join(missing)} is not installed: pip install penstock-sandbox[egress]",
                reason="EGRESS_MISSING",
            )
        self._options.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        process, certificate = await self._start()
        await asyncio.to_thread(_write_public, self._options.trust, certificate)
        self._tasks.start(self._keep(process), "egress proxy")

    async def aclose(self) -> None:
        """Ends the proxy."""
        await self._tasks.aclose()
        if self._process is not None:
            await _end(self._process)

    @property
    def pid(self) -> int | None:
        """The process id of the proxy that runs now."""
        return None if self._process is None else self._process.pid

    @property
    def certificate(self) -> Path:
        """The certificate's file."""
        return self._options.trust / "ca.pem"

    def given(self, sandbox: Sandbox, policy: NetworkPolicy) -> NetworkPolicy:
        """See manager.Egress."""
        if policy.kind is not NetworkKind.ALLOWLIST:
            return policy
        # A sandbox of another namespace never gets a recorded response, whatever its recording is called.
        own = f"{sandbox.namespace}/sandbox/{sandbox.id}"
        greeting = Greeting(
            sandbox_id=sandbox.id,
            recording=f"{sandbox.namespace}/named/{policy.recording}" if policy.recording else own,
            hosts=policy.hosts,
            denied_hosts=policy.denied_hosts,
            ports=policy.ports or DEFAULT_PORTS,
            recorded_only=policy.recorded_only,
            shared=bool(policy.recording),
        )
        return dataclasses.replace(policy, proxy=str(self._socket), proxy_greeting=greeting.encoded())

    def environment(self, policy: NetworkPolicy) -> Mapping[str, str]:
        """See manager.Egress."""
        if policy.kind is not NetworkKind.ALLOWLIST:
            return {}
        proxy = f"http://127.0.0.1:{policy.local_port}"
        return {
            **{name: proxy for upper in ("HTTP_PROXY", "HTTPS_PROXY") for name in (upper, upper.lower())},
            **dict.fromkeys(("NO_PROXY", "no_proxy"), _UNPROXIED),
            **dict.fromkeys(_CERTIFICATES, _BUNDLE),
            # Node's own fetch.
            "NODE_USE_ENV_PROXY": "1",
            # A body is complete here before its first byte is sent.
            "PIP_DEFAULT_TIMEOUT": str(round(self._options.timeout_s)),
        }

    def mounted(self) -> Sequence[MountedToolbox]:
        """See manager.Egress."""
        return (MountedToolbox("egress", self._options.trust, _MOUNT, (), {}),)

    async def _keep(self, process: asyncio.subprocess.Process) -> None:
        backoff = Backoff(_RESTARTS)
        while True:
            code = await process.wait()
            _log.error("the egress proxy ended", code=code)
            while True:
                await asyncio.sleep(backoff.next())
                try:
                    process, _ = await self._start()
                except FailedPrecondition as error:
                    _log.error("the egress proxy does not start", error=str(error))
                else:
                    self.restarted.set()
                    break

    async def _start(self) -> tuple[asyncio.subprocess.Process, bytes]:
        """Returns a proxy that listens, and its certificate."""
        options = self._options
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-m", "penstock_sandbox.egress"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            # Nothing of the service's: neither its secrets nor a proxy or a certificate of its user.
            env={"PATH": os.defpath},
        )
        assert process.stdin is not None and process.stdout is not None
        settings = {
            "folder": str(options.folder),
            "socket": str(self._socket),
            "private": list(options.private),
            "netrc": str(options.netrc or ""),
            "ca": str(options.ca or ""),
            "tokens": dict(options.tokens),
            "store_bytes": options.store_bytes,
            "max_object_bytes": options.max_object_bytes,
            "timeout_s": options.timeout_s,
            "recordings": options.recordings,
            "environment": _of_the_store(os.environ) if options.recordings.startswith(_S3) else {},
        }
        try:
            process.stdin.write(json.dumps(settings).encode() + b"\n")
            async with asyncio.timeout(_START_S):
                line = await process.stdout.readline()
            answer = json.loads(line)
            if (unusable := answer.get("unusable")) is not None:
                raise FailedPrecondition(f"egress_recordings: {unusable}", reason="EGRESS_RECORDINGS_UNUSABLE")
            certificate = answer["ca"].encode()
        except (OSError, TimeoutError, ValueError) as error:
            await _end(process)
            raise FailedPrecondition(
                "the egress proxy did not start; its error is on the service's standard error",
                reason="EGRESS_FAILED",
            ) from error
        except BaseException:
            await _end(process)
            raise
        self._process = process
        return process, certificate


def _of_the_store(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(_STORE) or name == "HOME"}


async def _end(process: asyncio.subprocess.Process) -> None:
    assert process.stdin is not None
    process.stdin.close()
    try:
        async with asyncio.timeout(_STOP_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


def _write_public(folder: Path, certificate: bytes) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o755)
    part = folder / "ca.part"
    part.write_bytes(certificate)
    part.chmod(0o644)
    part.replace(folder / "ca.pem")
