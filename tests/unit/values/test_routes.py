"""Which header routes each RPC: the option of the protos, and what `penstock.values.routes` makes of it."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from typing import Any, Final

import pytest
from google.protobuf.descriptor import MethodDescriptor

import penstock.driver.v1
import penstock.inference.v1
import penstock.interception.v1
import penstock.ops.v1
import penstock.sandbox.v1
from penstock.driver.v1 import terminal_service_pb2
from penstock.interception.v1 import intercept_service_pb2 as intercept
from penstock.sandbox.v1 import file_service_pb2, sandbox_service_pb2
from penstock.values import ids, routes

PACKAGES: Final = (
    *(penstock.driver.v1, penstock.inference.v1, penstock.interception.v1, penstock.ops.v1, penstock.sandbox.v1),
)

ALL: Final = "about all that the service has, or many of it"
SERVICE: Final = "about the service or its engine"
NEW: Final = "makes something, for which the service chooses the id"
NOT_ROUTED: Final = {
    **dict.fromkeys(
        (
            "RolloutService.ListRollouts",
            "RolloutService.WatchRollouts",
            "RolloutService.ListGroups",
            "RolloutService.ExportTrajectories",
            "RolloutGateService.ListRollouts",
            "RolloutGateService.WatchGate",
            "SandboxService.ListSandboxes",
            "SandboxService.WatchSandboxes",
            "SandboxService.DeleteSandboxes",
            "SandboxService.ListSnapshots",
            "ToolboxService.ListToolboxes",
            "RunService.LogMetrics",
            "RunService.ListMetrics",
            "RunService.DeleteMetrics",
        ),
        ALL,
    ),
    **dict.fromkeys(
        (
            "SandboxService.ListBackends",
            "SandboxService.GetNodeStatus",
            "ProcessService.WatchProcesses",
            "OperationsService.GetStatus",
            "OperationsService.GetServerInfo",
            "OperationsService.Drain",
            "OperationsService.Undrain",
            *(f"AgentService.{name}" for name in ("ListAgents", "GetAgent", "RegisterAgent", "DeleteAgent")),
            "AgentService.CheckAgent",
            *(
                f"InferenceService.{name}"
                for name in (
                    *("GetInfo", "GetTokenizer", "Score", "ScoreBatch", "Pause", "Resume", "Sleep", "Wake"),
                    *(
                        "UpdateWeights",
                        "InitTransfer",
                        "StartTransfer",
                        "TransferTensors",
                        "FinishTransfer",
                        "LoadAdapter",
                    ),
                    *("UnloadAdapter", "ListAdapters", "Render", "Parse", "ReportGap", "WatchStats"),
                )
            ),
        ),
        SERVICE,
    ),
    **dict.fromkeys(("TerminalService.OpenTerminal", "ToolboxService.PrepareToolbox"), NEW),
}
"""RPCs without a route, and why."""


def methods() -> Iterator[MethodDescriptor]:
    """Yields every RPC of every service."""
    for package in PACKAGES:
        for module in pkgutil.iter_modules(package.__path__):
            if module.name.endswith("_pb2"):
                found = importlib.import_module(f"{package.__name__}.{module.name}")
                for service in found.DESCRIPTOR.services_by_name.values():
                    yield from service.methods


def short(method: MethodDescriptor) -> str:
    return f"{method.containing_service.name}.{method.name}"


@pytest.mark.requirement("R113")
def test_every_rpc_is_routed_or_listed() -> None:
    """A new RPC about a rollout cannot be forgotten."""
    plain = {short(method) for method in methods() if not routes.declared(_path(method))}
    assert plain == set(NOT_ROUTED), plain ^ set(NOT_ROUTED)


@pytest.mark.requirement("R113")
def test_every_route_names_a_text_field_of_its_request() -> None:
    for method in methods():
        for header, field in routes.declared(_path(method)):
            message: Any = method.input_type
            *way, last = field.split(".")
            for name in way:
                message = message.fields_by_name[name].message_type
            assert message.fields_by_name[last].type == message.fields_by_name[last].TYPE_STRING, method.full_name
            assert header.startswith("x-penstock-")
            assert header.endswith("-id")


def _path(method: MethodDescriptor) -> str:
    return f"/{method.containing_service.full_name}/{method.name}"


@pytest.mark.parametrize(
    ("method", "request_", "expected"),
    [
        (
            "/penstock.sandbox.v1.SandboxService/ForkSandboxes",
            sandbox_service_pb2.ForkSandboxesRequest(snapshot_id="ss.n1.x"),
            {"x-penstock-snapshot-id": "ss.n1.x"},
        ),
        (
            "/penstock.sandbox.v1.FileService/WriteFile",
            file_service_pb2.WriteFileRequest(start=file_service_pb2.WriteFileRequest.WriteFileStart(sandbox_id="a")),
            {"x-penstock-sandbox-id": "a"},
        ),
        ("/penstock.sandbox.v1.FileService/WriteFile", file_service_pb2.WriteFileRequest(chunk=b"a"), {}),
        (
            "/penstock.interception.v1.InterceptService/LeaseCalls",
            intercept.LeaseCallsRequest(selector=intercept.CallSelector(rollout_ids=["a", "b"], group_id="g")),
            {"x-penstock-group-id": "g"},
        ),
        (
            "/penstock.interception.v1.InterceptService/LeaseCalls",
            intercept.LeaseCallsRequest(selector=intercept.CallSelector(rollout_ids=["a", "a"])),
            {"x-penstock-rollout-id": "a"},
        ),
        (
            "/penstock.driver.v1.TerminalService/Step",
            terminal_service_pb2.StepRequest(terminal_id="not\nsafe"),
            {},
        ),
        ("/penstock.driver.v1.TerminalService/Step", b"bytes of a proxy", {}),
        ("/another.Service/Method", terminal_service_pb2.StepRequest(terminal_id="t"), {}),
    ],
)
def test_headers_name_what_the_request_is_about(method: str, request_: Any, expected: dict[str, str]) -> None:
    assert dict(routes.headers(method, request_)) == expected


def test_an_id_carries_its_home() -> None:
    made = ids.make("sb", "n-1", "0" * 32)
    assert made == "sb.n-1." + "0" * 32
    assert ids.home_of(made) == ("sandbox", "n-1")
    assert ids.home_of("g.d1." + "f" * 32 + "-12") == ("driver", "d1")


@pytest.mark.parametrize(
    "value", ["", "sb-" + "0" * 32, "r.d1.x", "x.d1." + "0" * 32, "r.D1." + "0" * 32, "r.d1." + "0" * 32 + "-1-2"]
)
def test_ids_of_another_form_have_no_home(value: str) -> None:
    assert ids.home_of(value) is None
