"""What the protos declare and no service serves yet: every service refuses it by name, and no service sets it.

All of it is found by the option in the protos, so a new field or RPC is tested here, and a served one no longer is.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import AsyncIterator, Iterator
from typing import Any, Final

import grpc
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from tests.support import rpcs
from tests.support.rpcs import DECLARED, METHODS
from tests.support.services.stack import Running
from tests.unit.docs.pages import tables

from penstock.client import Task
from penstock.interception.v1 import intercept_service_pb2 as intercept
from penstock.interception.v1.intercept_service_pb2_grpc import InterceptServiceStub
from penstock.values.provisional import (
    feature_of,
    feature_of_method,
    is_provisional,
    is_provisional_method,
    provisional_set,
)
from penstock_chassis.channel import error_from_rpc
from penstock_interception.rpc.results import JUDGED_ALONE

Way = tuple[FieldDescriptor, ...]


def ways(descriptor: Descriptor, around: Way = ()) -> Iterator[Way]:
    """The fields that lead to each provisional field in a message, itself the last."""
    for field in descriptor.fields:
        if is_provisional(field):
            yield (*around, field)
        elif (inside := kind_of(field)) is not None and all(inside is not kind_of(step) for step in around):
            yield from ways(inside, (*around, field))


def kind_of(field: FieldDescriptor) -> Descriptor | None:
    """The message of the field, of an item, or of a map's value."""
    kind: Any = field.message_type
    if kind is not None and kind.GetOptions().map_entry:
        kind = kind.fields_by_name["value"].message_type
    return kind  # type: ignore[no-any-return]


def request_with(method: str, way: Way) -> Message:
    """A request that sets the field at the end of the way, and nothing else."""
    request: Any = GetMessageClass(METHODS[method].input_type)()
    message = request
    for field in way[:-1]:
        message = getattr(message, field.name)
        if field.is_repeated:
            message = message["x"] if hasattr(message, "keys") else message.add()
        else:
            message.SetInParent()
    last, value = way[-1], getattr(message, way[-1].name)
    if last.is_repeated:
        value.add() if last.message_type is not None else value.append("x" if last.type == last.TYPE_STRING else 1)
    elif last.message_type is not None:
        value.SetInParent()
    else:
        values: dict[int, Any] = {last.TYPE_STRING: "x", last.TYPE_BYTES: b"x", last.TYPE_BOOL: True}
        setattr(message, last.name, values.get(last.type, 1))
    return request  # type: ignore[no-any-return]


def path_of(way: Way) -> str:
    """As a violation has it."""

    def step(field: FieldDescriptor) -> str:
        is_map = field.message_type is not None and field.message_type.GetOptions().map_entry
        return field.name + ("[x]" if is_map else "[0]" if field.is_repeated else "")

    return ".".join([*map(step, way[:-1]), way[-1].name])


def not_served(feature: str) -> str:
    """What a violation says."""
    return f"is provisional: leave it out until the service has the feature {feature}"


FIELDS: Final = [(method, way) for method in METHODS for way in ways(METHODS[method].input_type)]
RPCS: Final = [name for name in DECLARED if is_provisional_method(name)]


async def refused(stack: Running, server: Any, name: str, request: Message) -> grpc.aio.AioRpcError:
    """The refusal of an RPC."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await rpcs.call(stack.stack.address(server), stack.stack.operator_token, name, request)
    return caught.value


@pytest.mark.requirement("R106")
@pytest.mark.parametrize("method", sorted({method for method, _ in FIELDS}))
async def test_a_provisional_field_of_a_request_is_refused_by_its_path(stack: Running, method: str) -> None:
    """Ignored, it would seem to take effect. A result among others is rejected by itself."""
    for way in (way for name, way in FIELDS if name == method):
        request, path, feature = request_with(method, way), path_of(way), feature_of(way[-1])
        assert provisional_set(request) == {path: feature}
        alone = next((index for index, step in enumerate(way) if _name(kind_of(step)) in JUDGED_ALONE), None)
        for server in rpcs.servers(method):
            if alone is not None and method.endswith("/CompleteCalls"):
                address = stack.stack.address("interception")
                answers = await rpcs.call(address, stack.stack.operator_token, method, request)
                (rejected,) = answers[0].acknowledged.rejected
                assert rejected.reason == intercept.ResultRejected.REASON_INVALID
                assert rejected.violations[0] == f"{path_of(way[alone + 1 :])}: {not_served(feature)}"
                continue
            if alone is not None:  # of a session: see the next test
                assert method.endswith("/Intercept")
                continue
            error = await refused(stack, server, method, request)
            typed = error_from_rpc(error)
            assert (error.code(), typed.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "FIELD_NOT_SERVED"), path
            assert [(item.field, item.description) for item in typed.violations] == [(path, not_served(feature))]


@pytest.mark.requirement("R106")
@pytest.mark.asyncio(loop_scope="session")
async def test_a_result_with_a_provisional_field_is_rejected_beside_a_good_one(stack: Running) -> None:
    """The session goes on, and the call may be answered again. A frame that has no items ends the session."""
    released = intercept.CallResult(call_id="none", release=intercept.Release())
    ahead = intercept.CallResult(call_id="x")
    ahead.completion.usage.draft_tokens = 3
    hello = intercept.InterceptRequest(hello=intercept.Hello(credits=intercept.Credits(calls=1)))
    later = intercept.InterceptRequest(hello=intercept.Hello(trainer_id="t"))
    async with grpc.aio.insecure_channel(stack.stack.address("interception")) as channel:
        metadata = (("authorization", f"Bearer {stack.stack.operator_token}"),)
        session: Any = InterceptServiceStub(channel).Intercept(metadata=metadata)
        await session.write(hello)
        await session.write(intercept.InterceptRequest(results=intercept.Results(results=[ahead, released])))
        answers = [frame async for frame in _until(session, "acknowledged")]
        invalid, unknown = answers[-1].acknowledged.rejected
        assert list(invalid.violations) == [f"completion.usage.draft_tokens: {not_served('usage.draft_tokens')}"]
        assert (invalid.reason, unknown.reason) == (
            intercept.ResultRejected.REASON_INVALID,
            intercept.ResultRejected.REASON_UNKNOWN_CALL,
        )
        await session.write(later)
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await anext(aiter(session))
    typed = error_from_rpc(ended.value)
    assert (typed.reason, [item.field for item in typed.violations]) == ("FIELD_NOT_SERVED", ["hello.trainer_id"])


async def _until(session: Any, kind: str) -> AsyncIterator[intercept.InterceptResponse]:
    """Frames up to the first of a kind."""
    async for frame in session:
        yield frame
        if frame.WhichOneof("frame") == kind:
            return


def _name(descriptor: Descriptor | None) -> str:
    return "" if descriptor is None else descriptor.full_name


@pytest.mark.requirement("R106")
@pytest.mark.parametrize("name", RPCS)
async def test_a_provisional_rpc_is_refused_by_name(stack: Running, name: str) -> None:
    """Also a request of it that has a provisional field."""
    for server in rpcs.servers(name):
        error = await refused(stack, server, name, GetMessageClass(DECLARED[name].input_type)())
        assert error.code() is grpc.StatusCode.UNIMPLEMENTED
        assert error_from_rpc(error).reason == "RPC_NOT_SERVED"
        assert name in (error.details() or "")
        assert feature_of_method(name) in (error.details() or "")


@pytest.mark.requirement("R106")
@pytest.mark.asyncio(loop_scope="session")
async def test_a_whole_rollout_shows_no_provisional_field(stack: Running) -> None:
    """In no answer about it, of any service; and no feature has the name of one."""
    rollout_id = secrets.token_hex(8)
    task = Task(task_id="quiet", instruction="Do nothing.")
    rollout = await stack.ps.rollouts.create(task, "shell", rollout_id=rollout_id, mode="transparent_proxy")
    await rollout.result()
    given = {"rollout_id": rollout_id, "include_bodies": True, "include_top": True}
    answers = list[Message]()
    for name in (
        "driver.v1.RolloutService/GetRollout",
        "driver.v1.RolloutService/ListRollouts",
        "driver.v1.RolloutService/WatchRollout",
        "driver.v1.RolloutService/GetTrajectory",
        "driver.v1.RolloutService/ExportTrajectories",
        "interception.v1.RolloutGateService/GetRollout",
        "interception.v1.RolloutGateService/GetCapture",
        "interception.v1.InterceptService/ListCalls",
        "inference.v1.InferenceService/GetInfo",
    ):
        method = f"penstock.{name}"
        kind = GetMessageClass(METHODS[method].input_type)
        (server,) = rpcs.servers(method)
        asked: Any = {key: value for key, value in given.items() if key in kind.DESCRIPTOR.fields_by_name}
        answers += await rpcs.call(
            stack.stack.address(server),  # type: ignore[arg-type]
            stack.stack.operator_token,
            method,
            kind(**asked),
        )
    (calls,) = [answer for answer in answers if answer.DESCRIPTOR.name == "ListCallsResponse"]
    assert len(calls.calls) >= 1  # type: ignore[attr-defined]
    assert [path for answer in answers for path in provisional_set(answer)] == []
    names = {feature for _, feature in declared()}
    for server in rpcs.SERVICES:
        info = "penstock.ops.v1.OperationsService/GetServerInfo"
        request = GetMessageClass(METHODS[info].input_type)()
        (answer,) = await rpcs.call(stack.stack.address(server), stack.stack.operator_token, info, request)  # type: ignore[arg-type]
        assert not {*answer.server.features} & names


@pytest.mark.requirement("R111")
def test_the_page_lists_what_is_provisional_and_nothing_else() -> None:
    """Each by its message or service, with its feature."""
    rows = tables("docs/compatibility.md")["Provisional"]
    listed = [
        (name, feature)
        for row in rows
        for name in re.findall(r"`([^`]+)`", row["fields and RPCs"])
        for feature in re.findall(r"`([^`]+)`", row["feature"])
    ]
    assert sorted(listed) == sorted(declared())


def declared() -> list[tuple[str, str]]:
    """Each provisional field and RPC, with its feature."""
    kinds = [kind for module in rpcs.modules() for kind in module.DESCRIPTOR.message_types_by_name.values()]
    fields = [
        (f"{kind.name}.{field.name}", feature_of(field))
        for kind in kinds
        for field in kind.fields
        if is_provisional(field)
    ]
    return fields + [(name.rpartition(".")[2], feature_of_method(name)) for name in RPCS]


def test_there_are_provisional_fields_and_rpcs_to_test() -> None:
    """Once all are served, this file can go."""
    assert FIELDS and RPCS
