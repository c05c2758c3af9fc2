"""Namespaces: which caller reaches what, and that calls to other services name the namespace."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from google.protobuf.field_mask_pb2 import FieldMask
from google.protobuf.wrappers_pb2 import StringValue

from penstock_chassis import auth
from penstock_chassis.auth import NAMESPACE_HEADER, Authenticator, Caller, Hidden, Owned, Quotas, Role, RoleTable, Token
from penstock_chassis.channel import connect, typed_errors
from penstock_chassis.errors import InvalidArgument, NotFound, PermissionDenied, ResourceExhausted
from penstock_chassis.interceptor import MOST_NAMED, ServerInterceptor
from penstock_chassis.testing import serve

TOKENS = {Role.OPERATOR: "op-token", Role.TRAINER: "trainer-token"}
TEAM = Token(Role.TRAINER, "team-a", "team-token")
METHODS = ("One", "Many", "Each")
OWNERS = {"mine": "team-a", "theirs": "team-b"}


def _metadata(token: str, *namespaces: str) -> list[tuple[str, str]]:
    return [("authorization", f"Bearer {token}"), *((NAMESPACE_HEADER, name) for name in namespaces)]


@pytest.mark.requirement("R107")
@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        (_metadata("op-token"), Caller(Role.OPERATOR, None)),
        (_metadata("op-token", "team-b"), Caller(Role.OPERATOR, "team-b")),
        (_metadata("trainer-token"), Caller(Role.TRAINER, "default")),
        (_metadata("team-token"), Caller(Role.TRAINER, "team-a")),
        (_metadata("team-token", "team-a"), Caller(Role.TRAINER, "team-a")),
    ],
)
def test_a_token_proves_its_namespace(metadata: list[tuple[str, str]], expected: Caller) -> None:
    assert Authenticator(TOKENS, more=[TEAM]).authenticate(metadata) == expected


@pytest.mark.requirement("R107")
@pytest.mark.parametrize("namespaces", [("team-b",), ("default",), ("team-a", "team-a"), ("",)])
def test_a_token_of_one_namespace_opens_no_other(namespaces: tuple[str, ...]) -> None:
    with pytest.raises(PermissionDenied) as refused:
        Authenticator(TOKENS, more=[TEAM]).authenticate(_metadata("team-token", *namespaces))
    assert refused.value.reason == "NAMESPACE_NOT_ALLOWED"


@pytest.mark.requirement("R107")
@pytest.mark.parametrize("namespaces", [("Team",), ("-a",), ("a" * 64,), ("a\n",), ("a", "b"), ("",)])
def test_an_operator_names_one_well_formed_namespace(namespaces: tuple[str, ...]) -> None:
    with pytest.raises(InvalidArgument) as refused:
        Authenticator(TOKENS).authenticate(_metadata("op-token", *namespaces))
    assert refused.value.reason == "NAMESPACE_INVALID"


@pytest.mark.requirement("R107")
def test_all_namespaces_are_for_operators_who_name_none() -> None:
    assert Caller(Role.OPERATOR, None).scope(all_namespaces=True) is None
    assert Caller(Role.OPERATOR, None).scope(all_namespaces=False) == "default"
    for caller in (Caller(Role.OPERATOR, "team-a"), Caller(Role.TRAINER, "team-a")):
        assert caller.scope(all_namespaces=False) == "team-a"
        with pytest.raises(PermissionDenied):
            caller.scope(all_namespaces=True)


def test_a_quota_counts_what_is_held() -> None:
    quotas = Quotas({"team-a": 2, "none": 0}, "rollouts")
    quotas.check("team-a", 1)
    quotas.check("other", 1_000_000)
    for namespace, held, more in (("team-a", 2, 1), ("team-a", 0, 3), ("none", 0, 1)):
        with pytest.raises(ResourceExhausted) as refused:
            quotas.check(namespace, held, more)
        assert refused.value.reason == "NAMESPACE_QUOTA"


class _Stub:
    """Echoes who calls; each message is an id."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        formats: dict[str, Any] = {"request_serializer": StringValue.SerializeToString}
        self.One: Any = channel.unary_unary("/a.S/One", **formats)
        self.Many: Any = channel.unary_stream("/a.S/Many", **formats)
        self.Each: Any = channel.stream_stream("/a.S/Each", **formats)


async def _one(request: StringValue, _context: object) -> bytes:
    if request.value not in OWNERS:
        raise NotFound(f"there is no {request.value}", reason="ONE_UNKNOWN", metadata={"id": request.value})
    return f"{auth.caller().role} {auth.caller().home} {auth.acts_in()}".encode()


async def _many(request: StringValue, context: object) -> Any:
    yield await _one(request, context)


async def _each(requests: Any, context: object) -> Any:
    async for request in requests:
        yield await _one(request, context)


def _add(_servicer: object, server: Any) -> None:
    read: Any = StringValue.FromString
    handlers: dict[str, Any] = {
        "One": grpc.unary_unary_rpc_method_handler(_one, read),
        "Many": grpc.unary_stream_rpc_method_handler(_many, read),
        "Each": grpc.stream_stream_rpc_method_handler(_each, read),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("a.S", handlers),))
    server.add_registered_method_handlers("a.S", handlers)


async def _namespace_of(resource_id: str) -> str | None:
    return OWNERS.get(resource_id)


async def _call(stub: _Stub, method: str, resource_id: str, metadata: Any) -> bytes:
    request = StringValue(value=resource_id)
    call = getattr(stub, method)(_stream(request) if method == "Each" else request, metadata=metadata)
    with typed_errors():
        if method == "One":
            return bytes(await call)
        return b"".join([answer async for answer in call])


async def _stream(*messages: StringValue) -> Any:
    for message in messages:
        yield message


@pytest.mark.requirement("R107")
@pytest.mark.parametrize("method", METHODS)
async def test_a_resource_of_another_namespace_does_not_exist(method: str) -> None:
    """In every kind of call; an operator who names no namespace reaches it, one who names another does not."""
    owned = {f"a.S/{name}": Owned(("value",), _namespace_of) for name in METHODS}
    served = serve((None, _add), roles={"a.S": {Role.TRAINER}}, tokens=TOKENS, more=[TEAM], owned=owned)
    async with served as (address, _), connect(address) as channel:
        stub = _Stub(channel)
        for metadata, expected in (
            (_metadata("team-token"), b"trainer team-a team-a"),
            (_metadata("op-token"), b"operator default None"),
            (_metadata("op-token", "team-a"), b"operator team-a team-a"),
        ):
            assert await _call(stub, method, "mine", metadata) == expected
        for metadata in (_metadata("team-token"), _metadata("op-token", "team-a"), _metadata("trainer-token")):
            for resource_id in ("theirs", "nobodys"):
                with pytest.raises(NotFound) as refused:
                    await _call(stub, method, resource_id, metadata)
                assert refused.value.reason == "ONE_UNKNOWN"
                assert refused.value.message == f"there is no {resource_id}"
                assert refused.value.metadata["id"] == resource_id
        assert await _call(stub, method, "theirs", _metadata("op-token")) == b"operator default None"


async def test_handlers_are_kept_for_a_bounded_number_of_named_namespaces() -> None:
    interceptor = ServerInterceptor(Authenticator(TOKENS), RoleTable({"a.S": {Role.TRAINER}}))

    async def served(_details: object) -> Any:
        return grpc.unary_unary_rpc_method_handler(_one, StringValue.FromString)

    async def handler(namespace: str) -> Any:
        details: Any = SimpleNamespace(method="/a.S/One", invocation_metadata=_metadata("op-token", namespace))
        return await interceptor.intercept_service(served, details)

    first = await handler("first")
    for number in range(2 * MOST_NAMED):
        assert await handler(f"n{number}") is not None
    assert await handler("first") is first
    assert await handler(f"n{MOST_NAMED}") is not await handler(f"n{MOST_NAMED}")


@pytest.mark.requirement("R107")
async def test_calls_to_other_services_name_the_namespace() -> None:
    async with serve((None, _add), tokens=TOKENS) as (_, channel):
        one, mine = _Stub(channel).One, StringValue(value="mine")
        assert await one(mine) == b"operator default None"
        with auth.acting_in("team-b"):
            assert await one(mine) == b"operator team-b team-b"
        assert await one(mine) == b"operator default None"


@pytest.mark.requirement("R107", "R13")
async def test_a_resource_that_is_named_often_is_replaced_once() -> None:
    """What is kept of a request does not grow with how often it names the same."""
    hidden = Hidden(Owned(("paths",), _namespace_of), Caller(Role.TRAINER, "team-a"))
    request = await hidden.hide(FieldMask(paths=["theirs"] * 1000 + ["mine"]))
    assert len(set(request.paths)) == 2 and "theirs" not in request.paths and request.paths[-1] == "mine"
    shown = hidden.shown(NotFound(f"there is no {request.paths[0]}", reason="ONE_UNKNOWN"))
    assert str(shown) == "there is no theirs"
