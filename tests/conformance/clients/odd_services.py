"""Answers that no service of ours gives on demand: a driver that is old, slow, busy, away for a moment, or confused."""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final, NoReturn

import grpc
import grpc.aio
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from penstock.chat.v1 import chat_pb2, completion_pb2
from penstock.driver.v1 import rollout_pb2, rollout_service_pb2
from penstock.ops.v1 import operations_service_pb2
from penstock.trajectory.v1 import trajectory_pb2

Context = grpc.aio.ServicerContext[Any, Any]

IMAGE: Final = "an image, büt none".encode()
OF_CALL: Final = bytes(range(6))
OF_SAMPLE: Final = bytes(range(6, 12))
"""Rows of the tensors of the odd driver's trajectories."""
_STREAMS: Final = frozenset({"WatchRollout", "GetTrajectory", "GetMedia", "GetTensor"})


class OddDriver:
    """Knows some rollouts, each of which stands for a way to answer; `attempts` counts how often each was asked for.

    A rollout `X at NAME` is elsewhere, if `homes` has an address of this name. With `drivers` it lists these by name.
    `tokens` has each request's token.
    """

    def __init__(self) -> None:
        self.homes: dict[str, str] = {}
        self.drivers: dict[str, str] = {}
        self.tokens: list[str] = []
        self.attempts: Counter[str] = Counter()
        self.abandoned = asyncio.Event()
        self.request_ids: list[str] = []
        self.user_agents: set[str] = set()
        self.routed: dict[str, str] = {}

    async def get_rollout(
        self, request: rollout_service_pb2.GetRolloutRequest, context: Context
    ) -> rollout_service_pb2.GetRolloutResponse:
        """As the id says."""
        name = request.rollout_id
        metadata = {key: str(value) for key, value in context.invocation_metadata() or ()}
        self.user_agents.add(metadata.get("user-agent", ""))
        self.routed[name] = metadata.get("x-penstock-rollout-id", "")
        self.attempts[name] += 1
        await self._send_home(name, context)
        match name:
            case "silent":
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    self.abandoned.set()
                    raise
            case "busy":
                await fail(
                    context,
                    grpc.StatusCode.RESOURCE_EXHAUSTED,
                    "Too many at once: come again.",
                    error_details_pb2.ErrorInfo(reason="QUEUE_FULL", domain="penstock", metadata={"queue": "7 ½"}),
                    error_details_pb2.RetryInfo(retry_delay=duration_pb2.Duration(seconds=1, nanos=500_000_000)),
                )
            case "away" if self.attempts[name] < 3:
                await fail(
                    context,
                    grpc.StatusCode.UNAVAILABLE,
                    "Restarting.",
                    error_details_pb2.ErrorInfo(reason="DRAINING", domain="penstock"),
                    error_details_pb2.RetryInfo(retry_delay=duration_pb2.Duration(nanos=20_000_000)),
                )
            case "confused":
                garbage = any_pb2.Any(type_url="type.googleapis.com/google.rpc.ErrorInfo", value=b"\xff\xffno info")
                await fail(context, grpc.StatusCode.NOT_FOUND, "Näh, 不知道 🤷", garbage)
        return rollout_service_pb2.GetRolloutResponse(
            rollout=rollout_pb2.Rollout(rollout_id=name, phase=rollout_pb2.PHASE_RUNNING)
        )

    async def watch_rollout(
        self, request: rollout_service_pb2.WatchRolloutRequest, context: Context
    ) -> AsyncIterator[rollout_service_pb2.WatchRolloutResponse]:
        """Its end; of one that is named `moved` and is elsewhere, an event and the error."""
        name = request.rollout_id
        self.attempts[name] += 1
        event = rollout_pb2.RolloutEvent(rollout_id=name, sequence=1)
        if name.startswith("moved"):
            event.phase_changed.phase = rollout_pb2.PHASE_RUNNING
            yield rollout_service_pb2.WatchRolloutResponse(event=event)
        await self._send_home(name, context)
        event.ended.SetInParent()
        yield rollout_service_pb2.WatchRolloutResponse(event=event)

    async def get_server_info(
        self, request: operations_service_pb2.GetServerInfoRequest, context: Context
    ) -> operations_service_pb2.GetServerInfoResponse:
        """The drivers that it lists; an older one does not know the question."""
        if not self.drivers:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
        members = [
            operations_service_pb2.Member(
                service="driver", name=name, address=address, state=operations_service_pb2.MEMBER_STATE_UP
            )
            for name, address in self.drivers.items()
        ]
        return operations_service_pb2.GetServerInfoResponse(members=members)

    async def _send_home(self, name: str, context: Context) -> None:
        self.tokens.append(str(dict(context.invocation_metadata() or ()).get("authorization", "")))
        home = name.partition(" at ")[2]
        if home in self.homes:
            found = {"home": home, "address": self.homes[home]}
            info = error_details_pb2.ErrorInfo(reason="HOME_ELSEWHERE", domain="penstock", metadata=found)
            await fail(context, grpc.StatusCode.FAILED_PRECONDITION, "Another driver has this.", info)

    async def get_trajectory(
        self, request: rollout_service_pb2.GetTrajectoryRequest, context: Context
    ) -> AsyncIterator[rollout_service_pb2.GetTrajectoryResponse]:
        """In two fragments: a call and a sample, each with an image and a tensor."""
        del context
        image = chat_pb2.Media(sha256=hashlib.sha256(IMAGE).digest(), media_type="image/png")
        call = trajectory_pb2.Call(call_id="c", media=[image])
        call.completion.tensors.append(_tensor(OF_CALL))
        sample = trajectory_pb2.Sample(sample_id="s", media=[image], tensors=[_tensor(OF_SAMPLE)])
        for part in ({"calls": [call]}, {"samples": [sample]}):
            whole = trajectory_pb2.Trajectory(rollout_id=request.rollout_id, **part)
            yield rollout_service_pb2.GetTrajectoryResponse(trajectory=whole)

    async def get_media(
        self, request: rollout_service_pb2.GetMediaRequest, context: Context
    ) -> AsyncIterator[rollout_service_pb2.GetMediaResponse]:
        """In two pieces. Of a rollout that is named `damaged` the last one is another."""
        if request.sha256 != hashlib.sha256(IMAGE).digest():
            unknown = error_details_pb2.ErrorInfo(reason="MEDIA_UNKNOWN", domain="penstock")
            await fail(context, grpc.StatusCode.NOT_FOUND, "There is no such image.", unknown)
        self.attempts[f"image of {request.rollout_id}"] += 1
        for chunk in (IMAGE[:3], b"?" if request.rollout_id == "damaged" else IMAGE[3:]):
            yield rollout_service_pb2.GetMediaResponse(chunk=chunk)

    async def get_tensor(
        self, request: rollout_service_pb2.GetTensorRequest, context: Context
    ) -> AsyncIterator[rollout_service_pb2.GetTensorResponse]:
        """A row a message. Of a rollout that is named `damaged` the last one is another."""
        del context
        assert (request.name, request.start) == ("routed_experts", 0)
        data = OF_CALL if request.call_id else OF_SAMPLE
        for at in range(0, len(data), 2):
            row = b"??" if at and request.rollout_id == "damaged" else data[at : at + 2]
            tensor = _tensor(row, start=at // 2)
            tensor.ClearField("sha256")
            tensor.data = row
            yield rollout_service_pb2.GetTensorResponse(tensor=tensor)

    async def create_rollout(
        self, request: rollout_service_pb2.CreateRolloutRequest, context: Context
    ) -> rollout_service_pb2.CreateRolloutResponse:
        """Takes it, and fails to say so the first time."""
        self.request_ids.append(request.request_id)
        if len(self.request_ids) == 1:
            await fail(context, grpc.StatusCode.UNAVAILABLE, "The answer was lost.")
        return rollout_service_pb2.CreateRolloutResponse(
            rollout=rollout_pb2.Rollout(rollout_id="once", phase=rollout_pb2.PHASE_QUEUED)
        )


def _tensor(data: bytes, start: int = 0) -> completion_pb2.TokenTensor:
    """Its description: two experts a token."""
    return completion_pb2.TokenTensor(
        name="routed_experts",
        dtype="uint8",
        start=start,
        shape=[len(data) // 2, 1, 2],
        sha256=hashlib.sha256(data).digest(),
    )


def _handlers(driver: OddDriver) -> grpc.GenericRpcHandler:
    methods: dict[str, tuple[Any, Any]] = {
        "GetRollout": (driver.get_rollout, rollout_service_pb2.GetRolloutRequest),
        "WatchRollout": (driver.watch_rollout, rollout_service_pb2.WatchRolloutRequest),
        "CreateRollout": (driver.create_rollout, rollout_service_pb2.CreateRolloutRequest),
        "GetTrajectory": (driver.get_trajectory, rollout_service_pb2.GetTrajectoryRequest),
        "GetMedia": (driver.get_media, rollout_service_pb2.GetMediaRequest),
        "GetTensor": (driver.get_tensor, rollout_service_pb2.GetTensorRequest),
    }
    handlers: dict[str, Any] = {
        name: (grpc.unary_stream_rpc_method_handler if name in _STREAMS else grpc.unary_unary_rpc_method_handler)(
            method, request.FromString, lambda answer: answer.SerializeToString()
        )
        for name, (method, request) in methods.items()
    }
    return grpc.method_handlers_generic_handler("penstock.driver.v1.RolloutService", handlers)


def _operations(driver: OddDriver) -> grpc.GenericRpcHandler:
    handler: Any = grpc.unary_unary_rpc_method_handler(
        driver.get_server_info,
        operations_service_pb2.GetServerInfoRequest.FromString,
        lambda answer: answer.SerializeToString(),
    )
    return grpc.method_handlers_generic_handler("penstock.ops.v1.OperationsService", {"GetServerInfo": handler})


async def fail(context: Context, code: grpc.StatusCode, message: str, *details: Message) -> NoReturn:
    """Ends the call with this status."""
    status = status_pb2.Status(code=code.value[0], message=message)
    for detail in details:
        packed = any_pb2.Any()
        packed.Pack(detail)
        status.details.append(detail if isinstance(detail, any_pb2.Any) else packed)
    context.set_trailing_metadata((("grpc-status-details-bin", status.SerializeToString()),))
    await context.abort(code, message)


@asynccontextmanager
async def odd_driver(credentials: grpc.ServerCredentials | None = None) -> AsyncIterator[tuple[OddDriver, str]]:
    """Serves it; gives it and its address."""
    driver = OddDriver()
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((_handlers(driver), _operations(driver)))
    port = (
        server.add_insecure_port("127.0.0.1:0")
        if credentials is None
        else server.add_secure_port("127.0.0.1:0", credentials)
    )
    await server.start()
    try:
        yield driver, f"127.0.0.1:{port}" if credentials is None else f"localhost:{port}"
    finally:
        await server.stop(None)


@asynccontextmanager
async def empty_server() -> AsyncIterator[str]:
    """A server of another age: none of our services is there. Gives its address."""
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)
