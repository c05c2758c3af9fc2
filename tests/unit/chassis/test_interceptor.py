"""The interceptor on a real server, for methods of every arity."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from tests.support.waiting import eventually

from penstock_chassis import errors, interceptor, rpc_status
from penstock_chassis.auth import Authenticator, Caller, Role
from penstock_chassis.channel import connect, typed_errors
from penstock_chassis.telemetry import bound
from penstock_chassis.testing import serve

ECHO = "penstock.test.v1.EchoService"
TOKENS = {Role.OPERATOR: "op-token", Role.TRAINER: "trainer-token", Role.OBSERVER: "observer-token"}
Invoke = Callable[..., Awaitable[list[bytes]]]


def untyped(channel: Any) -> Any:
    """A channel whose messages are raw bytes has no types to check."""
    return channel


def unary(channel: Any) -> Any:
    return channel.unary_unary(f"/{ECHO}/UnaryUnary")


def rpc_lines(logs: list[Any]) -> list[Any]:
    return [line for line in logs if line["event"] == "rpc"]


async def test_a_good_call_of_every_arity_is_answered_and_logged_once(
    invoke: Invoke, registration: Any, logs: list[Any]
) -> None:
    async with serve(registration) as (_, channel):
        assert set(await invoke(channel)) == {b"x"}
        await eventually(lambda: bool(rpc_lines(logs)), "the call is logged")  # after its answer
    (line,) = rpc_lines(logs)
    assert line["code"] == "OK"
    assert line["role"] == "operator"
    assert line["method"].startswith(ECHO)
    assert len(line["request_id"]) == 32


async def test_a_domain_error_reaches_the_caller_typed(invoke: Invoke, registration: Any, echo: Any) -> None:
    def fail(_context: object) -> None:
        raise errors.ResourceExhausted("full", reason="QUEUE_FULL", metadata={"depth": "8"}, retry_after_s=1.5)

    echo.behaviour = fail
    async with serve(registration) as (_, channel):
        with pytest.raises(errors.ResourceExhausted) as caught, typed_errors():
            await invoke(channel)
    assert caught.value.reason == "QUEUE_FULL"
    assert caught.value.metadata == {"depth": "8"}
    assert caught.value.retry_after_s == 1.5


@pytest.mark.requirement("R8")
async def test_an_internal_exception_never_reaches_the_caller(
    invoke: Invoke, registration: Any, echo: Any, logs: list[Any]
) -> None:
    """Generic text and an incident id; the details are in the log under that id."""

    def fail(_context: object) -> None:
        raise KeyError("sk-secret in a message")

    echo.behaviour = fail
    async with serve(registration) as (_, channel):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await invoke(channel)
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert "sk-secret" not in repr(caught.value)
    incident = rpc_status.from_rpc_error(caught.value).metadata[rpc_status.INCIDENT]
    # A call whose status grpc.aio lost is made again, and has a line of its own.
    (failure,) = [line for line in logs if line["event"] == "rpc failed" and line["incident_id"] == incident]
    assert isinstance(failure["exc_info"], KeyError)


async def test_an_abort_of_the_handler_itself_keeps_its_code(
    invoke: Invoke, registration: Any, echo: Any, logs: list[Any]
) -> None:
    echo.behaviour = lambda context: context.abort(grpc.StatusCode.OUT_OF_RANGE, "past the end")
    async with serve(registration) as (_, channel):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await invoke(channel)
        # The caller hears of an abort before the handler that makes it goes on.
        await eventually(lambda: bool(rpc_lines(logs)), "the call is logged")
    assert caught.value.code() is grpc.StatusCode.OUT_OF_RANGE
    assert caught.value.details() == "past the end"
    assert {line["code"] for line in rpc_lines(logs)} == {"OUT_OF_RANGE"}


@pytest.mark.requirement("R32")
async def test_cancelling_a_call_cancels_its_handler(
    invoke: Invoke, registration: Any, echo: Any, logs: list[Any]
) -> None:
    """A cancelled wait releases what it held."""
    entered, released = asyncio.Event(), asyncio.Event()

    async def wait() -> None:
        entered.set()
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            released.set()
            raise

    echo.behaviour = lambda _context: wait()
    async with serve(registration) as (_, channel):
        call = asyncio.ensure_future(invoke(channel))
        await entered.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await released.wait()
    assert [line["code"] for line in rpc_lines(logs)] == ["CANCELLED"]


async def test_a_stream_that_is_left_early_runs_its_clean_up(registration: Any, echo: Any) -> None:
    async with serve(registration) as (_, channel):
        echo.behaviour = lambda _context: asyncio.get_running_loop().create_future()
        call = untyped(channel).unary_stream(f"/{ECHO}/UnaryStream")(b"x")
        async for _ in call:
            break
        call.cancel()
    assert echo.closed == 1


async def test_the_callers_request_id_is_kept_when_it_is_well_formed(
    invoke: Invoke, registration: Any, logs: list[Any]
) -> None:
    async with serve(registration) as (_, channel):
        await invoke(channel, metadata=(("x-request-id", "run-7.step_3"),))
    assert rpc_lines(logs)[0]["request_id"] == "run-7.step_3"


@pytest.mark.requirement("R8")
@pytest.mark.parametrize("hostile", ["", "x" * 65, "a b", "a{b}", "a;rm"])
async def test_a_malformed_request_id_is_replaced(hostile: str, registration: Any, logs: list[Any]) -> None:
    """What a caller writes into the log is bounded."""
    async with serve(registration) as (_, channel):
        await unary(channel)(b"x", metadata=(("x-request-id", hostile),))
    assert len(rpc_lines(logs)[0]["request_id"]) == 32


async def test_a_call_to_another_service_carries_the_request_id_on(
    registration: Any, echo: Any, logs: list[Any]
) -> None:
    async with serve(registration) as (address, channel), connect(address) as inner:

        async def relay() -> None:
            echo.behaviour = lambda _context: None
            await unary(inner)(b"inner")

        echo.behaviour = lambda _context: relay()
        await unary(channel)(b"x", metadata=(("x-request-id", "abc"),))
    assert [line["request_id"] for line in rpc_lines(logs)] == ["abc", "abc"]


@pytest.mark.requirement("R8")
async def test_no_body_and_no_token_is_ever_logged(invoke: Invoke, registration: Any, logs: list[Any]) -> None:
    """No credential in logs; bodies never at info."""
    async with serve(registration, tokens=TOKENS) as (_, channel):
        await invoke(channel)
    assert "op-token" not in repr(logs)
    assert "b'x'" not in repr(logs)


@pytest.mark.requirement("R3", "R5")
@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        "Bearer wrong",
        "Basic op-token",
        "op-token",
        "Bearer op-token x",
        "Bearer  op-token",
    ],
)
async def test_a_call_without_a_valid_token_is_refused_before_the_handler_runs(
    header: str | None, invoke: Invoke, registration: Any, echo: Any
) -> None:
    """Authorisation comes first; an empty credential authorises nothing."""
    reached: list[object] = []
    echo.behaviour = lambda context: reached.append(context)
    async with serve(registration, tokens=TOKENS) as (address, _), connect(address) as channel:
        with pytest.raises(errors.Unauthenticated) as caught, typed_errors():
            await invoke(channel, metadata=() if header is None else (("authorization", header),))
    assert caught.value.reason in ("CREDENTIAL_MISSING", "CREDENTIAL_INVALID")
    assert reached == []


@pytest.mark.requirement("R8", "R148")
async def test_a_flood_of_refused_calls_writes_a_bounded_number_of_lines(
    registration: Any, logs: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some lines for each reason; of one who may call, a line for each call."""
    monkeypatch.setattr(interceptor, "REFUSED_BURST", 3)
    monkeypatch.setattr(interceptor, "REFUSED_INTERVAL_S", 1e9)
    async with serve(registration, tokens=TOKENS) as (address, channel):
        async with connect(address) as nobody, connect(address, "wrong") as stranger:
            for caller in (nobody, stranger):
                for _ in range(40):
                    with pytest.raises(errors.Unauthenticated), typed_errors():
                        await unary(caller)(b"x")
        for _ in range(10):
            await unary(channel)(b"x")
        await eventually(lambda: sum(line["code"] == "OK" for line in rpc_lines(logs)) == 10, "all are logged")
    refused = [line for line in rpc_lines(logs) if line["code"] != "OK"]
    assert [line["reason"] for line in refused] == ["CREDENTIAL_MISSING"] * 3 + ["CREDENTIAL_INVALID"] * 3


@pytest.mark.requirement("R5")
async def test_caller_is_authenticated_once(invoke: Invoke, registration: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer goes on with the call."""
    asked: list[Caller] = []
    authenticate = Authenticator.authenticate

    def counted(self: Authenticator, metadata: Any) -> Caller:
        asked.append(authenticate(self, metadata))
        return asked[-1]

    monkeypatch.setattr(Authenticator, "authenticate", counted)
    async with serve(registration, tokens=TOKENS) as (_, channel):
        await invoke(channel)
    assert asked == [Caller(Role.OPERATOR, None)]


async def test_two_authorization_headers_are_refused(invoke: Invoke, registration: Any) -> None:
    async with serve(registration, tokens=TOKENS) as (_, channel):
        with pytest.raises(errors.Unauthenticated), typed_errors():
            await invoke(channel, metadata=(("authorization", "Bearer op-token"),))


@pytest.mark.parametrize(
    ("role", "method", "allowed"),
    [
        (Role.OPERATOR, "UnaryUnary", True),
        (Role.OPERATOR, "StreamUnary", True),
        (Role.TRAINER, "UnaryUnary", True),
        (Role.TRAINER, "StreamUnary", False),
        (Role.OBSERVER, "UnaryUnary", False),
        (Role.OBSERVER, "StreamUnary", True),
    ],
)
async def test_the_table_says_which_role_may_call_which_method(
    role: Role, method: str, allowed: bool, registration: Any, echo: Any
) -> None:
    """A method's own line wins over its service's; the operator may call everything. Logs name the caller's role."""
    seen: list[str] = []
    echo.behaviour = lambda _context: seen.append(bound.facts()["role"])
    roles = {ECHO: [Role.OBSERVER], f"{ECHO}/UnaryUnary": [Role.TRAINER]}
    async with (
        serve(registration, roles=roles, tokens=TOKENS) as (address, _),
        connect(address, TOKENS[role]) as channel,
    ):
        path = f"/{ECHO}/{method}"
        call = (
            untyped(channel).unary_unary(path)(b"x")
            if method == "UnaryUnary"
            # A refusal comes before the request is read, and grpc.aio loses it while a request is written.
            else untyped(channel).stream_unary(path)(iter([b"x"] if allowed else []))
        )
        if allowed:
            assert await call == b"x"
            assert seen == [str(role)]
        else:
            with pytest.raises(errors.PermissionDenied) as caught, typed_errors():
                await call
            assert caught.value.reason == "ROLE_NOT_ALLOWED"
            assert seen == []


async def test_a_method_that_the_table_forgot_is_for_operators_only(invoke: Invoke, registration: Any) -> None:
    async with (
        serve(registration, tokens=TOKENS) as (address, _),
        connect(address, TOKENS[Role.TRAINER]) as channel,
    ):
        with pytest.raises(errors.PermissionDenied), typed_errors():
            await invoke(channel)


@pytest.mark.requirement("R7")
async def test_health_check_needs_no_token_and_says_alive_only(registration: Any) -> None:
    async with serve(registration, tokens=TOKENS) as (address, _), connect(address) as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert answer == health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING)
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert await anext(aiter(watch)) == answer
        watch.cancel()


@pytest.mark.parametrize("role", list(Role))
async def test_reflection_lists_the_services_to_every_role(role: Role, registration: Any) -> None:
    async with (
        serve(registration, tokens=TOKENS) as (address, _),
        connect(address, TOKENS[role]) as channel,
    ):
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        (answer,) = [item async for item in stub.ServerReflectionInfo(iter([request]))]
    names = {service.name for service in answer.list_services_response.service}
    assert names == {ECHO, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}


async def test_log_context_of_one_call_does_not_leak_into_the_next(
    registration: Any, echo: Any, logs: list[Any]
) -> None:
    async with serve(registration) as (_, channel):
        call = unary(channel)
        echo.behaviour = lambda _context: bound.bind(rollout_id="r1")
        await call(b"x")
        echo.behaviour = lambda _context: None
        await call(b"x")
    first, second = rpc_lines(logs)
    assert first["rollout_id"] == "r1"
    assert "rollout_id" not in second
