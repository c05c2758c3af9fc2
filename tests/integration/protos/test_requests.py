"""Rules of requests that hold for every RPC of every service: one reason for an invalid field, pages, request ids.

A new RPC must be sorted into the lists below.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from typing import Any, Final

import grpc
import pytest
import pytest_asyncio
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from tests.support import rpcs
from tests.support.rpcs import METHODS
from tests.support.services.stack import Running

from penstock.driver.v1 import agent_service_pb2 as agents
from penstock.driver.v1 import rollout_service_pb2 as driver
from penstock.driver.v1 import run_service_pb2 as runs
from penstock.driver.v1 import terminal_service_pb2 as terminals
from penstock.inference.v1 import inference_service_pb2 as engine
from penstock.interception.v1 import interception_pb2 as common
from penstock.interception.v1 import rollout_gate_service_pb2 as gate
from penstock.ops.v1 import operations_service_pb2 as operations
from penstock.sandbox.v1 import process_service_pb2 as processes
from penstock.sandbox.v1 import sandbox_pb2, toolbox_service_pb2
from penstock.sandbox.v1 import sandbox_service_pb2 as sandboxes
from penstock_chassis.channel import error_from_rpc
from penstock_chassis.validation import MAX_REQUEST_ID

_NEGATIVE: Final = Duration(seconds=-1)

CREATES: Final[Mapping[str, Callable[[], Message]]] = {
    "penstock.driver.v1.RolloutService/CreateRollout": lambda: driver.CreateRolloutRequest(request_id="i"),
    "penstock.driver.v1.RolloutService/CreateGroup": lambda: driver.CreateGroupRequest(request_id="i", size=-1),
    "penstock.driver.v1.RolloutService/BranchRollout": lambda: driver.BranchRolloutRequest(request_id="i", count=-1),
    "penstock.driver.v1.TerminalService/OpenTerminal": lambda: terminals.OpenTerminalRequest(
        request_id="i", max_steps=-1
    ),
    "penstock.interception.v1.RolloutGateService/OpenRollout": lambda: gate.OpenRolloutRequest(
        request_id="i", rollout_id="i"
    ),
    "penstock.interception.v1.RolloutGateService/IssueToken": lambda: gate.IssueTokenRequest(
        request_id="i", retire_others_after=_NEGATIVE
    ),
    "penstock.sandbox.v1.SandboxService/CreateSandbox": lambda: sandboxes.CreateSandboxRequest(
        request_id="i", spec=sandbox_pb2.SandboxSpec(lease=_NEGATIVE)
    ),
    "penstock.sandbox.v1.SandboxService/ForkSandboxes": lambda: sandboxes.ForkSandboxesRequest(
        request_id="i", snapshot_id="s", count=-1
    ),
    "penstock.inference.v1.InferenceService/Generate": lambda: engine.GenerateRequest(request_id="i", token_ids=b"odd"),
}
"""RPCs that create something, each with a request of which a field is invalid. All have a required request_id."""

CREATES_ON_SOME_ENGINES: Final = {"penstock.inference.v1.InferenceService/StartTransfer"}
"""Of these, those that the scripted engine refuses (CAPABILITY_MISSING) before it reads the request."""

REPEATABLE: Final = {
    "penstock.driver.v1.AgentService": "RegisterAgent",
    "penstock.driver.v1.RolloutService": "RegradeRollout AnnotateTrajectory",
    "penstock.driver.v1.RunService": "LogMetrics",
    "penstock.interception.v1.InterceptService": "RegisterTools",
    "penstock.inference.v1.InferenceService": "InitTransfer TransferTensors UpdateWeights LoadAdapter ReportGap",
    "penstock.sandbox.v1.SandboxService": "PrepareSnapshot",
    "penstock.sandbox.v1.ToolboxService": "PrepareToolbox",
    "penstock.sandbox.v1.ProcessService": "StartProcess",
    "penstock.sandbox.v1.FileService": "WriteFile WriteTree MakeDirectory",
}
"""RPCs that make something under a name, an id or a digest of the caller's, so that a repeat makes nothing else."""

DOES_NOT_CREATE: Final = {
    "penstock.driver.v1.AgentService": "ListAgents GetAgent DeleteAgent CheckAgent",
    "penstock.driver.v1.RolloutService": (
        "GetRollout ListRollouts WatchRollout WatchRollouts WaitRollout PauseRollout ResumeRollout CancelRollout "
        "DeleteRollout GetGroup ListGroups WatchGroup WaitGroup PauseGroup ResumeGroup CancelGroup DeleteGroup "
        "GetTrajectory GetTensor GetMedia ExportTrajectories"
    ),
    "penstock.driver.v1.RunService": "ListMetrics DeleteMetrics",
    "penstock.driver.v1.TerminalService": "Step CloseTerminal GetTerminal",
    "penstock.interception.v1.InterceptService": "Intercept LeaseCalls CompleteCalls ListCalls GetCall",
    "penstock.interception.v1.RolloutGateService": (
        "CheckSource LoadRecording AskUser HoldCalls CloseRollout DeleteRollout RevokeTokens GetRollout ListRollouts "
        "GetCapture WatchCalls WatchGate"
    ),
    "penstock.inference.v1.InferenceService": (
        "GetInfo GetTokenizer Score ScoreBatch Abort Pause Resume Sleep Wake FinishTransfer UnloadAdapter ListAdapters "
        "Render Parse WatchStats"
    ),
    "penstock.ops.v1.OperationsService": "GetStatus GetServerInfo Drain Undrain",
    "penstock.sandbox.v1.SandboxService": (
        "GetSandbox GetDataPlane ListSandboxes WatchSandbox WatchSandboxes DeleteSandbox DeleteSandboxes RenewLease "
        "ListBackends GetNodeStatus GetSnapshot ListSnapshots DeleteSnapshot SetNetworkPolicy PauseSandbox "
        "ResumeSandbox GetStats DiffSandbox"
    ),
    "penstock.sandbox.v1.ToolboxService": "ListToolboxes DeleteToolbox",
    "penstock.sandbox.v1.ProcessService": (
        "WatchProcess WatchProcesses WriteStdin SignalProcess KillProcess ResizePty GetProcess ListProcesses "
        "WaitProcess Run"
    ),
    "penstock.sandbox.v1.FileService": "ReadFile ReadTree Stat List Remove",
}

INVALID: Final[Mapping[str, Callable[[], Message]]] = {
    "penstock.driver.v1.AgentService/RegisterAgent": agents.RegisterAgentRequest,
    "penstock.sandbox.v1.SandboxService/PrepareSnapshot": lambda: sandboxes.PrepareSnapshotRequest(
        spec=sandboxes.SnapshotSpec(setup=[processes.Command()])
    ),
    "penstock.sandbox.v1.ToolboxService/PrepareToolbox": lambda: toolbox_service_pb2.PrepareToolboxRequest(
        spec=toolbox_service_pb2.ToolboxSpec(npm_packages=["latest"])
    ),
    "penstock.sandbox.v1.ProcessService/StartProcess": processes.StartProcessRequest,
    "penstock.driver.v1.RunService/LogMetrics": runs.LogMetricsRequest,
    "penstock.driver.v1.RunService/ListMetrics": runs.ListMetricsRequest,
    "penstock.driver.v1.RunService/DeleteMetrics": lambda: runs.DeleteMetricsRequest(run_id="r", from_step=-1),
    "penstock.ops.v1.OperationsService/GetStatus": lambda: operations.GetStatusRequest(patience=_NEGATIVE),
}
"""More requests of which a field is invalid."""

PAGED: Final = [name for name, method in METHODS.items() if "page_size" in method.input_type.fields_by_name]


def _full(table: Mapping[str, str]) -> list[str]:
    return [f"{service}/{method}" for service, methods in table.items() for method in methods.split()]


async def _refused(stack: Running, server: Any, name: str, request: Message) -> tuple[str, list[str]]:
    """Reason and fields of the refusal."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await rpcs.call(stack.stack.address(server), stack.stack.operator_token, name, request)
    error = error_from_rpc(caught.value)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT, error
    return error.reason, [violation.field for violation in error.violations]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def existing(stack: Running) -> dict[str, str]:
    """Fields that name the resource whose contents are listed."""
    name, rollout_id = "penstock.interception.v1.RolloutGateService/OpenRollout", secrets.token_hex(8)
    opening = gate.OpenRolloutRequest(request_id=rollout_id, rollout_id=rollout_id, mode=common.MODE_INTERCEPTION_GATE)
    await rpcs.call(stack.stack.address("interception"), stack.stack.operator_token, name, opening)
    sandbox = await stack.ps.sandboxes.create()
    return {"rollout_id": rollout_id, "sandbox_id": sandbox.sandbox_id, "path": "/"}


@pytest.mark.requirement("R114")
def test_every_rpc_is_sorted_into_creating_and_not() -> None:
    """A new RPC that creates something has a request_id, or its caller names what it makes."""
    sorted_ = [*CREATES, *CREATES_ON_SOME_ENGINES, *_full(REPEATABLE), *_full(DOES_NOT_CREATE)]
    assert sorted(sorted_) == sorted(METHODS)
    assert len(PAGED) >= 10


@pytest.mark.requirement("R114")
def test_every_creating_rpc_has_a_request_id_and_others_have_none() -> None:
    """LeaseCalls alone has one that is optional: it creates no lease that the answer does not carry."""
    having = {name for name, method in METHODS.items() if "request_id" in method.input_type.fields_by_name}
    assert having - {"penstock.interception.v1.InterceptService/LeaseCalls"} == CREATES.keys() | CREATES_ON_SOME_ENGINES


@pytest.mark.requirement("R114")
@pytest.mark.parametrize("name", CREATES)
async def test_a_creating_request_without_a_usable_request_id_is_refused(stack: Running, name: str) -> None:
    """Before anything is created: a client could not repeat it safely."""
    (server,) = rpcs.servers(name)
    for request_id in ("", "x" * (MAX_REQUEST_ID + 1)):
        request: Any = CREATES[name]()
        if name.endswith("/Generate"):
            request.token_ids = b"\x03\0\0\0"
        request.request_id = request_id
        assert await _refused(stack, server, name, request) == ("FIELD_INVALID", ["request_id"])


@pytest.mark.requirement("R114")
@pytest.mark.parametrize("name", [*CREATES, *INVALID])
async def test_an_invalid_field_has_one_reason_in_every_service(stack: Running, name: str) -> None:
    """The violations name the field."""
    for server in rpcs.servers(name):
        reason, fields = await _refused(stack, server, name, {**CREATES, **INVALID}[name]())
        assert reason == "FIELD_INVALID" and fields and "" not in fields


@pytest.mark.requirement("R114")
@pytest.mark.parametrize("name", PAGED)
async def test_pages_have_one_rule_in_every_service(stack: Running, existing: dict[str, str], name: str) -> None:
    """A negative size and a token of another list are refused; a size above the maximum is the maximum."""
    (server,) = rpcs.servers(name)
    kind = GetMessageClass(METHODS[name].input_type)
    given: dict[str, Any] = {key: value for key, value in existing.items() if key in kind.DESCRIPTOR.fields_by_name}
    assert await _refused(stack, server, name, kind(**given, page_size=-1)) == ("FIELD_INVALID", ["page_size"])
    assert await _refused(stack, server, name, kind(**given, page_token="no token")) == (
        "FIELD_INVALID",
        ["page_token"],
    )
    for size in (0, 5000):
        (page,) = await rpcs.call(
            stack.stack.address(server),  # type: ignore[arg-type]
            stack.stack.operator_token,
            name,
            kind(**given, page_size=size),
        )
        assert page.DESCRIPTOR.full_name == METHODS[name].output_type.full_name
