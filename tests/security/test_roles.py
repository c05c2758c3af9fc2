"""Every RPC of every service, from the descriptors: nothing without a token, nothing beyond a role (R5, R6, R14)."""

from __future__ import annotations

from typing import Any, Final

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from tests.support.rpcs import METHODS, SERVICES, servers
from tests.support.services.stack import OBSERVER_TOKEN, Running

_BESIDE: Final = {"grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}
"""What every service has and no proto of ours."""

_OBSERVER_MAY: Final = {
    "penstock.sandbox.v1.SandboxService": (
        "GetSandbox ListSandboxes WatchSandbox WatchSandboxes GetStats ListBackends GetSnapshot ListSnapshots"
    ),
    "penstock.sandbox.v1.ToolboxService": "ListToolboxes",
    "penstock.driver.v1.AgentService": "ListAgents GetAgent",
    "penstock.driver.v1.RolloutService": (
        "GetRollout ListRollouts WatchRollout WatchRollouts WaitRollout GetGroup ListGroups WatchGroup WaitGroup "
        "GetTrajectory GetTensor GetMedia ExportTrajectories"
    ),
    "penstock.driver.v1.RunService": "ListMetrics",
    "penstock.driver.v1.TerminalService": "GetTerminal",
    "penstock.interception.v1.RolloutGateService": "GetRollout ListRollouts GetCapture WatchCalls WatchGate",
    "penstock.interception.v1.InterceptService": "ListCalls GetCall",
    "penstock.inference.v1.InferenceService": "GetInfo GetTokenizer ListAdapters WatchStats",
    "penstock.ops.v1.OperationsService": "GetServerInfo GetStatus",
}
"""docs/interfaces.md: an observer reads lists, states, events and trajectories. Whatever is not here is refused."""


SERVED: Final = [(server, name) for name in METHODS for server in servers(name)]


def _allowed_to_observers(name: str) -> bool:
    service, _, method = name.partition("/")
    return method in _OBSERVER_MAY.get(service, "").split()


async def _refusal(running: Running, server: str, name: str, *tokens: str) -> tuple[grpc.StatusCode, str]:
    """Code and reason of the refusal of an empty request."""
    method = METHODS[name]
    async with grpc.aio.insecure_channel(running.stack.address(server)) as channel:  # type: ignore[arg-type]
        metadata = tuple(("authorization", f"Bearer {token}") for token in tokens)
        calls: dict[tuple[bool, bool], Any] = {
            (False, False): channel.unary_unary,
            (False, True): channel.unary_stream,
            (True, False): channel.stream_unary,
            (True, True): channel.stream_stream,
        }
        invoke = calls[method.client_streaming, method.server_streaming](f"/{name}")
        # Nothing is written to a request stream: a refusal comes first, and a write that loses the race is an error.
        call = invoke(*(() if method.client_streaming else (b"",)), metadata=metadata, timeout=60)
        try:
            if method.server_streaming and not method.client_streaming:
                await call.read()  # the first answer is enough where the stream has no end
            else:
                await call.code()
        except grpc.aio.AioRpcError:
            pass  # the code below says it
        else:
            if method.server_streaming and not method.client_streaming and not call.done():
                call.cancel()
                return grpc.StatusCode.OK, ""
        return await call.code(), _reason(await call.trailing_metadata())


def _reason(trailing: Any) -> str:
    """The stable reason in a status's details."""
    status = status_pb2.Status.FromString(dict(trailing or ()).get("grpc-status-details-bin", b""))
    info = error_details_pb2.ErrorInfo()
    return next((info.reason for detail in status.details if detail.Unpack(info)), "")


def test_the_table_names_only_methods_that_exist() -> None:
    """A renamed RPC must not slip out of these tests."""
    named = {f"{service}/{method}" for service, methods in _OBSERVER_MAY.items() for method in methods.split()}
    assert named - METHODS.keys() == set()
    assert len(METHODS) > 60


@pytest.mark.requirement("R6")
@pytest.mark.parametrize("service", SERVICES)
async def test_served_rpcs_are_all_in_these_tests(stack: Running, service: Any) -> None:
    """Asked by reflection, so that a service that somebody adds is not served untested."""
    credential = (("authorization", f"Bearer {stack.stack.operator_token}"),)
    async with grpc.aio.insecure_channel(stack.stack.address(service)) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        asked = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        answer = await stub.ServerReflectionInfo(asked, metadata=credential, timeout=60).read()
        served = {each.name for each in answer.list_services_response.service}
    tested = {name.partition("/")[0] for server, name in SERVED if server == service}
    assert served - _BESIDE == tested


@pytest.mark.requirement("R3", "R5", "R6", "R14")
@pytest.mark.parametrize(("server", "name"), SERVED)
async def test_rpc_without_a_valid_token_is_refused_before_its_request_is_read(
    stack: Running, server: str, name: str
) -> None:
    unauthenticated = grpc.StatusCode.UNAUTHENTICATED
    assert await _refusal(stack, server, name) == (unauthenticated, "CREDENTIAL_MISSING")
    for wrong in ("0" * 64, "", stack.stack.operator_token[:-1], stack.stack.operator_token + "0"):
        assert await _refusal(stack, server, name, wrong) == (unauthenticated, "CREDENTIAL_INVALID")
    both = await _refusal(stack, server, name, "0" * 64, stack.stack.operator_token)
    assert both == (unauthenticated, "CREDENTIAL_INVALID")


@pytest.mark.requirement("R6", "R14")
@pytest.mark.parametrize(("server", "name"), SERVED)
async def test_an_observer_may_read_and_nothing_else(stack: Running, server: str, name: str) -> None:
    """Each RPC that changes state, or shows what a sandbox holds, refuses an observer."""
    code, reason = await _refusal(stack, server, name, OBSERVER_TOKEN)
    if _allowed_to_observers(name):
        assert code is not grpc.StatusCode.PERMISSION_DENIED, reason
        assert code is not grpc.StatusCode.UNAUTHENTICATED, reason
    else:
        assert (code, reason) == (grpc.StatusCode.PERMISSION_DENIED, "ROLE_NOT_ALLOWED")


@pytest.mark.requirement("R6", "R7")
@pytest.mark.parametrize("service", SERVICES)
async def test_reflection_wants_a_token_and_health_says_alive_to_anybody(stack: Running, service: Any) -> None:
    async with grpc.aio.insecure_channel(stack.stack.address(service)) as channel:
        health: Any = channel.unary_unary("/grpc.health.v1.Health/Check")
        assert await health(b"", timeout=60) == b"\x08\x01"
        reflection: Any = channel.stream_stream("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")
        assert await reflection(timeout=60).code() is grpc.StatusCode.UNAUTHENTICATED
