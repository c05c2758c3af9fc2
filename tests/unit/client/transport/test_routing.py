"""The Python SDK sends the headers that route each RPC, whatever the ids are."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message_factory import GetMessageClass
from tests.unit.client.conftest import Fakes, Refusal
from tests.unit.values.test_routes import methods

from penstock.client import FailedPrecondition, Penstock
from penstock.client.transport.endpoints import Endpoints
from penstock.client.transport.rpc import Service
from penstock.driver.v1 import rollout_pb2, rollout_service_pb2
from penstock.values import routes


@pytest.mark.requirement("R113")
async def test_the_sdk_names_the_rollout_in_a_header(ps: Penstock, fakes: Fakes) -> None:
    answer = rollout_service_pb2.GetRolloutResponse(
        rollout=rollout_pb2.Rollout(rollout_id="r1", phase=rollout_pb2.PHASE_QUEUED)
    )
    fakes.queue("GetRollout", answer)
    await ps.rollouts.get("r1")
    assert fakes.metadata[-1]["x-penstock-rollout-id"] == "r1"


class _Recorder(grpc.GenericRpcHandler):
    """Serves every method, and answers nothing; `sent` is the metadata of each request."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        self.sent.append(dict(details.invocation_metadata))
        return grpc.stream_stream_rpc_method_handler(self._refuse)

    async def _refuse(self, requests: Any, context: Any) -> AsyncIterator[bytes]:
        async for _ in requests:  # first: grpc.aio loses the status of a stream that ends while it is written to
            pass
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "recorded")
        yield b""


async def _send(channel: Any, method: MethodDescriptor, request: Any) -> None:
    """As a generated stub does."""
    kind = f"{'stream' if method.client_streaming else 'unary'}_{'stream' if method.server_streaming else 'unary'}"
    path = f"/{method.containing_service.full_name}/{method.name}"
    call = getattr(channel, kind)(path, request_serializer=lambda message: message.SerializeToString())
    begun = call(iter((request,)) if method.client_streaming else request)
    with pytest.raises(grpc.aio.AioRpcError, match="recorded"):
        if method.server_streaming:
            [item async for item in begun]
        else:
            await begun


@pytest.mark.requirement("R113")
async def test_the_sdk_sends_the_headers_of_every_rpc() -> None:
    """For each field that the protos name."""
    recorder = _Recorder()
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((recorder,))
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    service = Service("driver", Endpoints(driver=address))
    expected = []
    try:
        for method in methods():
            for header, field in routes.declared(f"/{method.containing_service.full_name}/{method.name}"):
                request = GetMessageClass(method.input_type)()
                _fill(request, field.split("."), "id-1")
                await _send(service.channel, method, request)
                expected.append((header, "id-1"))
    finally:
        await service.close()
        await server.stop(None)
    assert [
        next(item for item in sent.items() if item[0].startswith("x-penstock-")) for sent in recorder.sent
    ] == expected


def _fill(message: Any, path: list[str], value: str) -> None:
    name, *rest = path
    field = message.DESCRIPTOR.fields_by_name[name]
    if not rest:
        getattr(message, name).append(value) if field.is_repeated else setattr(message, name, value)
    else:
        _fill(getattr(message, name).add() if field.is_repeated else getattr(message, name), rest, value)


@pytest.mark.parametrize("odd", ["Größe", "a\nb", "\x00", "x" * 256, "a\tb", "\x7f"])
@pytest.mark.requirement("R113")
async def test_an_id_that_fits_no_header_is_sent_in_the_request_alone(odd: str, ps: Penstock, fakes: Fakes) -> None:
    fakes.queue("GetRollout", Refusal(grpc.StatusCode.FAILED_PRECONDITION, "SEEN"))
    with pytest.raises(FailedPrecondition):
        await ps.rollouts.get(odd)
    assert "x-penstock-rollout-id" not in fakes.metadata[-1]
    assert fakes.requests["GetRollout"][-1].rollout_id == odd


@pytest.mark.parametrize(
    "address",
    [
        "203.0.113.1:443",
        "evil.example:443",
        "localhost.evil.example:443",
        "127.0.0.1.evil.example:443",
        "127.0.0.1:80@evil.example:443",
        "dns:///evil.example:443",
        "dns://127.0.0.1/evil.example:443",
        "unix:80",
        "unix:///run/evil:1",
        "unix-abstract:1",
        "0.0.0.0:80",
        "127.0.0.1",
        "127.0.0.1:80,evil.example:80",
        " 127.0.0.1:80",
        "127.0.0.1:80\n",
        "",
    ],
)
@pytest.mark.requirement("R118")
async def test_no_token_in_cleartext_follows_an_address_elsewhere(address: str) -> None:
    """Nor one in a form that gRPC takes for something else."""
    service = Service("driver", Endpoints(driver="127.0.0.1:1", token="t" * 32))
    elsewhere = partial(FailedPrecondition, "Elsewhere", reason="HOME_ELSEWHERE")
    try:
        assert service._home_of(elsewhere(metadata={"home": "d2", "address": address})) is None
        assert service._home_of(elsewhere(metadata={"home": "d2", "address": "127.0.0.1:7"})) is not None
    finally:
        await service.close()
