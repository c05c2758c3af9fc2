"""What a backend may lack, and the proof that it then refuses: nothing is left out silently.

A test that needs a capability says so with `@needs("fork")`. On a backend that declares it the test runs; on one that
does not, what runs instead shows that asking for it is refused with FAILED_PRECONDITION, before anything is made.
"""

from __future__ import annotations

import functools
import inspect
import secrets
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from tests.conformance.sandbox.services import Running

from penstock.sandbox.v1 import process_service_pb2 as ps
from penstock.sandbox.v1 import sandbox_pb2 as sb
from penstock.sandbox.v1 import sandbox_service_pb2 as ss
from penstock_chassis.channel import error_from_rpc
from penstock_chassis.errors import FailedPrecondition

_PORT = 4000

_SPECS: dict[str, dict[str, Any]] = {
    "network_none": {"network": sb.NetworkPolicy(none=sb.NoNetwork())},
    "one_endpoint": {
        "network": sb.NetworkPolicy(one_endpoint=sb.OneEndpoint(local_port=_PORT, upstream="127.0.0.1:9"))
    },
    "limit_cpu": {"resources": sb.Resources(cpu=1)},
    "limit_memory": {"resources": sb.Resources(memory_bytes=1 << 28)},
    "limit_pids": {"resources": sb.Resources(pids=100)},
    "limit_disk": {"resources": sb.Resources(disk_bytes=1 << 28)},
    "limit_inodes": {"resources": sb.Resources(inodes=10_000)},
    "root": {"user": "root"},
    "own_kernel": {"own_kernel": True},
    "toolboxes": {"toolbox_ids": ["any"]},
    "companions": {"companions": [sb.Companion(name="db", image="any")]},
}
"""For each capability that a spec can ask for, a spec that does."""

_NETWORKS = {"network_none": sb.NETWORK_KIND_NONE, "one_endpoint": sb.NETWORK_KIND_ONE_ENDPOINT}


def declares(capabilities: sb.Capabilities, name: str) -> bool:
    """Whether a backend claims a capability: a field of Capabilities, `network_none`, or `one_endpoint`."""
    if name in _NETWORKS:
        return _NETWORKS[name] in capabilities.networks
    if name == "fork":
        return capabilities.fork not in (sb.FORK_KIND_UNSPECIFIED, sb.FORK_KIND_NONE)
    return bool(getattr(capabilities, name))


def narrowest(capabilities: sb.Capabilities) -> sb.NetworkPolicy:
    """The policy for a sandbox that needs no network: none at all, where the backend can."""
    if declares(capabilities, "network_none"):
        return sb.NetworkPolicy(none=sb.NoNetwork())
    return sb.NetworkPolicy(open=sb.OpenNetwork())


def needs(*names: str) -> Callable[[Callable[..., Awaitable[None]]], Callable[..., Awaitable[None]]]:
    """Run a test where the backend declares all of `names`; elsewhere prove that it refuses what it does not."""

    def wrap(test: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
        wanted = inspect.signature(test).parameters

        @functools.wraps(test)
        async def run(**given: Any) -> None:
            missing = [name for name in names if not declares(given["capabilities"], name)]
            for name in missing:
                await refused(given["service"], given["capabilities"], name)
            if not missing:
                await test(**{name: given[name] for name in wanted})

        extra = [
            inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD)
            for name in ("service", "capabilities")
            if name not in wanted
        ]
        run.__signature__ = inspect.Signature([*wanted.values(), *extra])  # type: ignore[attr-defined]
        return run

    return wrap


async def refused(service: Running, capabilities: sb.Capabilities, name: str) -> None:
    """Prove that a capability which is not declared is refused."""
    if name in _SPECS:
        wish = sb.SandboxSpec(**{"network": narrowest(capabilities), **_SPECS[name]})
        create = ss.CreateSandboxRequest(request_id=secrets.token_hex(8), spec=wish)
        await _refuses(service.sandboxes.CreateSandbox(create, timeout=60), name)
    elif name == "fork":
        spec = sb.SandboxSpec(network=narrowest(capabilities))
        prepare = ss.PrepareSnapshotRequest(spec=ss.SnapshotSpec(sandbox=spec))
        await _refuses(_drained(service.sandboxes.PrepareSnapshot(prepare, timeout=60)), name)
    else:
        create = ss.CreateSandboxRequest(
            request_id=secrets.token_hex(8), spec=sb.SandboxSpec(network=narrowest(capabilities))
        )
        box = (await service.sandboxes.CreateSandbox(create, timeout=120)).sandbox
        try:
            await _refuses(_in_sandbox(service, box.sandbox_id, name), name)
        finally:
            await service.sandboxes.DeleteSandbox(ss.DeleteSandboxRequest(sandbox_id=box.sandbox_id), timeout=60)


def _in_sandbox(service: Running, sandbox_id: str, name: str) -> Awaitable[object]:
    if name == "diff":
        return _drained(service.sandboxes.DiffSandbox(ss.DiffSandboxRequest(sandbox_id=sandbox_id), timeout=60))
    if name == "pause":
        return service.sandboxes.PauseSandbox(ss.PauseSandboxRequest(sandbox_id=sandbox_id), timeout=60)
    command = ps.Command(argv=ps.Argv(args=["true"]))
    request = ps.StartProcessRequest(sandbox_id=sandbox_id, process_id="p", command=command)
    if name == "pty":
        request.pty.CopyFrom(ps.PtySize(rows=24, columns=80))
    elif name == "stdin_stream":
        request.stdin = True
    else:
        raise AssertionError(f"nothing is known that would ask for {name}")
    return service.processes.StartProcess(request, timeout=60)


async def _drained(stream: Any) -> None:
    async for _ in stream:
        pass


async def _refuses(call: Awaitable[object], name: str) -> None:
    try:
        await call
    except grpc.aio.AioRpcError as error:
        failure = error_from_rpc(error)
        assert isinstance(failure, FailedPrecondition) and failure.reason == "CAPABILITY_MISSING", (name, failure)
        return
    raise AssertionError(f"{name} is not declared, and yet it was not refused")
