"""Every RPC of the protos, and the method of the Python client that calls it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import grpc
import pytest
from google.protobuf.descriptor import MethodDescriptor

from penstock.client.transport import rpc
from penstock.driver.v1 import agent_service_pb2, rollout_service_pb2, run_service_pb2, terminal_service_pb2
from penstock.inference.v1 import inference_service_pb2
from penstock.interception.v1 import intercept_service_pb2, rollout_gate_service_pb2
from penstock.ops.v1 import operations_service_pb2
from penstock.sandbox.v1 import file_service_pb2, process_service_pb2, sandbox_service_pb2, toolbox_service_pb2
from penstock.values.provisional import is_provisional_method

_FILES: Final = (
    agent_service_pb2,
    rollout_service_pb2,
    run_service_pb2,
    terminal_service_pb2,
    inference_service_pb2,
    intercept_service_pb2,
    rollout_gate_service_pb2,
    operations_service_pb2,
    file_service_pb2,
    process_service_pb2,
    sandbox_service_pb2,
    toolbox_service_pb2,
)

METHODS: Final[dict[str, dict[str, str]]] = {
    "AgentService": {
        "ListAgents": "AgentsClient.list",
        "GetAgent": "AgentsClient.get",
        "RegisterAgent": "AgentsClient.register",
        "DeleteAgent": "AgentsClient.delete",
        "CheckAgent": "AgentsClient.check",
    },
    "RolloutService": {
        "CreateRollout": "RolloutsClient.create",
        "GetRollout": "RolloutsClient.get",
        "ListRollouts": "RolloutsClient.list",
        "WatchRollout": "RolloutHandle.events",
        "WatchRollouts": "RolloutsClient.watch",
        "WaitRollout": "RolloutHandle.result",
        "CancelRollout": "RolloutHandle.cancel",
        "PauseRollout": "RolloutHandle.pause",
        "ResumeRollout": "RolloutHandle.resume",
        "DeleteRollout": "RolloutHandle.delete",
        "CreateGroup": "GroupsClient.create",
        "BranchRollout": "RolloutHandle.branch",
        "RegradeRollout": "RolloutHandle.regrade",
        "GetGroup": "GroupsClient.attach",
        "ListGroups": "GroupsClient.list",
        "WatchGroup": "GroupHandle.events",
        "WaitGroup": "GroupHandle.wait",
        "CancelGroup": "GroupHandle.cancel",
        "PauseGroup": "GroupHandle.pause",
        "ResumeGroup": "GroupHandle.resume",
        "DeleteGroup": "GroupHandle.delete",
        "GetTrajectory": "RolloutHandle.trajectory",
        "GetTensor": "RolloutsClient.trajectory",
        "GetMedia": "RolloutHandle.image",
        "AnnotateTrajectory": "RolloutHandle.annotate",
        "ExportTrajectories": "RolloutsClient.export",
    },
    "RunService": {
        "LogMetrics": "RunsClient.log",
        "ListMetrics": "RunsClient.metrics",
        "DeleteMetrics": "RunsClient.delete_metrics",
    },
    "TerminalService": {
        "OpenTerminal": "TerminalsClient.open",
        "Step": "TerminalHandle.run",
        "CloseTerminal": "TerminalHandle.close",
        "GetTerminal": "TerminalHandle.refresh",
    },
    "InferenceService": {
        "GetInfo": "InferenceClient.info",
        "GetTokenizer": "InferenceClient.tokenizer",
        "Generate": "InferenceClient.generate",
        "Score": "InferenceClient.score",
        "ScoreBatch": "InferenceClient.score_batch",
        "Abort": "InferenceClient.abort",
        "Pause": "InferenceClient.pause",
        "Resume": "InferenceClient.resume",
        "Sleep": "InferenceClient.sleep",
        "Wake": "InferenceClient.wake",
        "UpdateWeights": "InferenceClient.update_weights",
        "InitTransfer": "InferenceClient.init_transfer",
        "StartTransfer": "InferenceClient.start_transfer",
        "TransferTensors": "WeightTransfer.tensors",
        "FinishTransfer": "WeightTransfer.commit",
        "LoadAdapter": "InferenceClient.load_adapter",
        "UnloadAdapter": "InferenceClient.unload_adapter",
        "ListAdapters": "InferenceClient.adapters",
        "Render": "InferenceClient.render",
        "Parse": "InferenceClient.parse",
        "ReportGap": "InferenceClient.report_gap",
        "WatchStats": "InferenceClient.watch_stats",
    },
    "InterceptService": {
        "Intercept": "InterceptSession.calls",
        "LeaseCalls": "GateClient.lease_calls",
        "CompleteCalls": "LeasedCall.deliver",
        "RegisterTools": "InterceptSession.offer_tools",
        "ListCalls": "GateClient.calls",
        "GetCall": "GateClient.call",
    },
    "RolloutGateService": {
        "CheckSource": "GateClient.check_source",
        "OpenRollout": "GateClient.open",
        "LoadRecording": "GateClient.load_recording",
        "HoldCalls": "GateClient.hold_calls",
        "CloseRollout": "GateClient.close",
        "DeleteRollout": "GateClient.delete",
        "IssueToken": "GateClient.issue_key",
        "RevokeTokens": "GateClient.revoke_keys",
        "GetRollout": "GateClient.get",
        "ListRollouts": "GateClient.list",
        "GetCapture": "GateClient.capture",
        "WatchCalls": "GateClient.watch_calls",
        "WatchGate": "GateClient.watch",
    },
    "OperationsService": {
        "GetStatus": "OperationsClient.status",
        "GetServerInfo": "OperationsClient.server_info",
        "Drain": "OperationsClient.drain",
        "Undrain": "OperationsClient.undrain",
    },
    "FileService": {
        "ReadFile": "SandboxHandle.read_file",
        "WriteFile": "SandboxHandle.write_file",
        "ReadTree": "SandboxHandle.read_tree",
        "WriteTree": "SandboxHandle.write_tree",
        "Stat": "SandboxHandle.stat",
        "List": "SandboxHandle.files",
        "MakeDirectory": "SandboxHandle.make_directory",
        "Remove": "SandboxHandle.remove",
    },
    "ProcessService": {
        "StartProcess": "SandboxHandle.start",
        "WatchProcess": "ProcessHandle.output",
        "WriteStdin": "ProcessHandle.write",
        "SignalProcess": "ProcessHandle.signal",
        "KillProcess": "ProcessHandle.kill",
        "ResizePty": "ProcessHandle.resize",
        "GetProcess": "SandboxHandle.process",
        "ListProcesses": "SandboxHandle.processes",
        "WaitProcess": "ProcessHandle.wait",
        "Run": "SandboxHandle.run",
    },
    "SandboxService": {
        "CreateSandbox": "SandboxesClient.create",
        "GetSandbox": "SandboxHandle.refresh",
        "GetDataPlane": "SandboxesClient.attach",
        "ListSandboxes": "SandboxesClient.list",
        "WatchSandbox": "SandboxHandle.watch",
        "WatchSandboxes": "SandboxesClient.watch",
        "DeleteSandbox": "SandboxHandle.delete",
        "DeleteSandboxes": "SandboxesClient.delete_all",
        "RenewLease": "SandboxHandle.renew",
        "ListBackends": "SandboxesClient.backends",
        "GetNodeStatus": "SandboxesClient.node_status",
        "PrepareSnapshot": "SandboxesClient.prepare",
        "GetSnapshot": "SandboxesClient.snapshot",
        "ListSnapshots": "SandboxesClient.snapshots",
        "DeleteSnapshot": "SandboxesClient.delete_snapshot",
        "ForkSandboxes": "SandboxHandle.fork",
        "SetNetworkPolicy": "SandboxHandle.narrow_network",
        "PauseSandbox": "SandboxHandle.pause",
        "ResumeSandbox": "SandboxHandle.resume",
        "GetStats": "SandboxHandle.stats",
        "DiffSandbox": "SandboxHandle.diff",
    },
    "ToolboxService": {
        "PrepareToolbox": "ToolboxesClient.prepare",
        "ListToolboxes": "ToolboxesClient.list",
        "DeleteToolbox": "ToolboxesClient.delete",
    },
}
"""By service and RPC."""

ELSEWHERE: Final = {
    "InferenceService/TransferTensors": "tests/integration/vllm/test_client.py",
    "InferenceService/FinishTransfer": "tests/integration/vllm/test_client.py",
    "RolloutService/GetTensor": "tests/integration/client/test_rollouts.py",
    "RolloutService/GetMedia": "tests/integration/client/media/test_images.py",
}
"""RPCs that the scripted engine cannot be brought to: a test that calls each by the client's method."""


NOT_IN_CLIENT: Final = {
    "ProcessService/WatchProcesses": "tests/unit/driver/clients/test_watches.py",
    "RolloutGateService/AskUser": "tests/integration/interception/models/test_users.py",
}
"""RPCs for services, which have more to watch than a client: a test of their caller."""


def rpcs() -> Iterator[MethodDescriptor]:
    """Every RPC of the protos that is served, to clients."""
    for file in _FILES:
        for service in file.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                is_served = not is_provisional_method(f"{service.full_name}/{method.name}")
                if is_served and f"{service.name}/{method.name}" not in NOT_IN_CLIENT:
                    yield method


@dataclass(frozen=True, slots=True)
class Calls:
    """RPCs that a client called, as SERVICE/RPC."""

    made: set[str]

    def of(self, service: str) -> set[str]:
        """Those of one service."""
        return {name.partition("/")[2] for name in self.made if name.startswith(f"{service}/")}


class _Noting:
    """A channel that notes the RPC of each call."""

    def __init__(self, channel: grpc.aio.Channel, calls: Calls) -> None:
        self._channel = channel
        self._calls = calls

    def __getattr__(self, name: str) -> object:
        found = getattr(self._channel, name)
        if not name.startswith(("unary_", "stream_")):
            return found

        def multicallable(method: str, *args: object, **kwargs: object) -> object:
            made = found(method, *args, **kwargs)
            short = method.rpartition(".")[2]

            def called(*args: object, **kwargs: object) -> object:
                self._calls.made.add(short)
                return made(*args, **kwargs)

            return called

        return multicallable


def noted(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Notes the calls of each client that is connected from now on."""
    calls = Calls(set())
    really = rpc._open
    monkeypatch.setattr(rpc, "_open", lambda *args: _Noting(really(*args), calls))
    return calls
