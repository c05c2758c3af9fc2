"""Answers that no service of ours gives on demand: a driver that is old, slow, busy, away for a moment, or confused."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NoReturn

import grpc
import grpc.aio
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from penstock.driver.v1 import rollout_pb2, rollout_service_pb2
from penstock.ops.v1 import operations_service_pb2

Context = grpc.aio.ServicerContext[Any, Any]


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


def _handlers(driver: OddDriver) -> grpc.GenericRpcHandler:
    methods: dict[str, tuple[Any, Any]] = {
        "GetRollout": (driver.get_rollout, rollout_service_pb2.GetRolloutRequest),
        "WatchRollout": (driver.watch_rollout, rollout_service_pb2.WatchRolloutRequest),
        "CreateRollout": (driver.create_rollout, rollout_service_pb2.CreateRolloutRequest),
    }
    handlers: dict[str, Any] = {
        name: (
            grpc.unary_stream_rpc_method_handler if name.startswith("Watch") else grpc.unary_unary_rpc_method_handler
        )(method, request.FromString, lambda answer: answer.SerializeToString())
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
