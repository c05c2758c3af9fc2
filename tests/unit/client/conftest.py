"""Strict fakes at the wire: a test fails when an answer that it queued was not asked for, or one was asked for that it
did not queue."""

import asyncio
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import pytest
from google.protobuf.any_pb2 import Any as AnyMessage
from google.rpc import error_details_pb2, status_pb2

from penstock.client import Penstock, connect
from penstock.driver.v1 import agent_service_pb2_grpc, rollout_service_pb2_grpc, terminal_service_pb2_grpc
from penstock.inference.v1 import inference_service_pb2_grpc
from penstock.interception.v1 import intercept_service_pb2 as icpt
from penstock.interception.v1 import intercept_service_pb2_grpc
from penstock.sandbox.v1 import file_service_pb2_grpc, process_service_pb2_grpc, sandbox_service_pb2_grpc

TOKEN = "sk-test '$(leak)"


class Refusal(Exception):
    """A queued answer that is an error of the service."""

    def __init__(
        self,
        code: grpc.StatusCode,
        reason: str = "",
        *,
        retry_after: float | None = None,
        violations: tuple[tuple[str, str], ...] = (),
        message: str = "refused",
    ) -> None:
        super().__init__(reason)
        self.code, self.text = code, message
        details = []
        if reason:
            info = AnyMessage()
            info.Pack(error_details_pb2.ErrorInfo(reason=reason, domain="penstock"))
            details.append(info)
        if violations:
            bad = error_details_pb2.BadRequest()
            for field, description in violations:
                bad.field_violations.add(field=field, description=description)
            packed = AnyMessage()
            packed.Pack(bad)
            details.append(packed)
        if retry_after is not None:
            retry = error_details_pb2.RetryInfo()
            retry.retry_delay.FromNanoseconds(int(retry_after * 1e9))
            packed = AnyMessage()
            packed.Pack(retry)
            details.append(packed)
        self.details = status_pb2.Status(code=code.value[0], message=message, details=details).SerializeToString()

    async def abort(self, context: Any) -> None:
        await context.abort(self.code, self.text, (("grpc-status-details-bin", self.details),))


class Fakes:
    """What the fake services shall answer, in order, and what they were asked."""

    def __init__(self) -> None:
        self.answers: dict[str, deque[Any]] = defaultdict(deque)
        self.requests: dict[str, list[Any]] = defaultdict(list)
        self.metadata: list[dict[str, Any]] = []
        self.conversations: deque[Callable[[Gate], Awaitable[None]]] = deque()
        self.faults: list[str] = []

    def queue(self, method: str, *answers: Any) -> None:
        """Answers for calls to come: a message, a list of messages for a stream, or a Refusal (also within a list)."""
        self.answers[method].extend(answers)

    def converse(self, *conversations: "Callable[[Gate], Awaitable[None]]") -> None:
        """Scripts for the Intercept streams to come."""
        self.conversations.extend(conversations)

    def take(self, method: str, request: Any, context: Any) -> Any:
        self.metadata.append(dict(context.invocation_metadata()))
        self.requests[method].append(request)
        if not self.answers[method]:
            self.faults.append(f"{method} was called once too often")
            return Refusal(grpc.StatusCode.INTERNAL, "NOT_SCRIPTED", message=f"{method} was not expected")
        return self.answers[method].popleft()

    def check(self) -> None:
        left = [f"{method} x{len(queue)}" for method, queue in self.answers.items() if queue]
        left += ["a conversation"] * len(self.conversations)
        assert not left, f"never asked for: {left}"
        assert not self.faults, self.faults


class Gate:
    """The service's side of one Intercept stream."""

    def __init__(self, requests: AsyncIterator[icpt.InterceptRequest], context: Any) -> None:
        self._requests = requests
        self._context = context

    async def read(self) -> icpt.InterceptRequest | None:
        """The next frame that is no heartbeat; None at the end."""
        async for frame in self._requests:
            if not frame.HasField("heartbeat"):
                return frame
        return None

    async def hello(
        self,
        session_id: str = "s1",
        *,
        resumed: bool = False,
        held: tuple[str, ...] = (),
        interval: float = 30.0,
        answered: asyncio.Event | None = None,
    ) -> icpt.Hello:
        """Reads Hello and answers it; not before `answered`, if given."""
        frame = await self.read()
        assert frame is not None and frame.HasField("hello"), frame
        welcome = icpt.Welcome(session_id=session_id, credits=frame.hello.credits, resumed=resumed, held_call_ids=held)
        welcome.heartbeat_interval.FromNanoseconds(round(interval * 1e9))
        if answered is not None:
            await answered.wait()
        await self.send(welcome=welcome)
        return frame.hello

    async def send(self, **frame: Any) -> None:
        await self._context.write(icpt.InterceptResponse(**frame))

    async def calls(self, *call_ids: str, lease: str = "l1", **fields: Any) -> None:
        calls = [
            icpt.ModelCall(call_id=call_id, lease_id=lease, **{"rollout_id": "r1", "prompt_count": 2, **fields})
            for call_id in call_ids
        ]
        await self.send(calls=icpt.Calls(calls=calls))

    async def results(self) -> dict[str, icpt.CallResult]:
        """The results of the next frame, by call."""
        frame = await self.read()
        assert frame is not None and frame.HasField("results"), frame
        return {result.call_id: result for result in frame.results.results}

    async def accept(self, *call_ids: str) -> None:
        await self.send(acknowledged=icpt.ResultsAcknowledged(accepted_call_ids=call_ids))

    async def goodbye(self) -> None:
        frame = await self.read()
        assert frame is not None and frame.HasField("goodbye"), frame
        assert await self.read() is None

    async def fail(self, refusal: Refusal) -> None:
        """Ends the stream. Read first: grpc.aio loses the status of a stream that ends while it is written to."""
        await refusal.abort(self._context)


def _fake_gate(fakes: Fakes) -> Any:
    async def intercept(self: Any, requests: AsyncIterator[icpt.InterceptRequest], context: Any) -> None:
        fakes.metadata.append(dict(context.invocation_metadata()))
        if not fakes.conversations:
            fakes.faults.append("Intercept was called once too often")
            await context.abort(grpc.StatusCode.INTERNAL, "not expected")
        try:
            await fakes.conversations.popleft()(Gate(requests, context))
        except AssertionError as error:
            fakes.faults.append(f"in a conversation: {error!r}")
            raise

    def unary(name: str) -> Any:
        async def method(self: Any, request: Any, context: Any) -> Any:
            answer = fakes.take(name, request, context)
            if isinstance(answer, Refusal):
                await answer.abort(context)
            return answer

        return method

    base = intercept_service_pb2_grpc.InterceptServiceServicer
    names = [name for name in vars(base) if name[0].isupper()]
    served = {"Intercept": intercept, **{name: unary(name) for name in ("RegisterTools", "GetCall")}}
    return type("FakeGate", (base,), {**dict.fromkeys(names), **served})()


def _fake(fakes: Fakes, servicer: type[Any], streaming: set[str], uploads: set[str]) -> Any:
    """A servicer whose methods take what `fakes` has queued."""

    def unary(name: str) -> Any:
        async def method(self: Any, request: Any, context: Any) -> Any:
            answer = fakes.take(name, request, context)
            if isinstance(answer, Refusal):
                await answer.abort(context)
            return answer

        return method

    def upload(name: str) -> Any:
        async def method(self: Any, requests: Any, context: Any) -> Any:
            answer = fakes.take(name, [item async for item in requests], context)
            if isinstance(answer, Refusal):
                await answer.abort(context)
            return answer

        return method

    def stream(name: str) -> Any:
        async def method(self: Any, request: Any, context: Any) -> AsyncIterator[Any]:
            answer = fakes.take(name, request, context)
            for item in answer if isinstance(answer, list) else [answer]:
                if isinstance(item, Refusal):
                    await item.abort(context)
                yield item

        return method

    names = [name for name in vars(servicer) if name[0].isupper()]
    made = {
        name: stream(name) if name in streaming else upload(name) if name in uploads else unary(name) for name in names
    }
    return type(f"Fake{servicer.__name__}", (servicer,), made)()


@pytest.fixture
async def fakes() -> AsyncIterator[Fakes]:
    """The script; checked for leftovers at the end."""
    made = Fakes()
    yield made
    made.check()


@pytest.fixture
async def address(fakes: Fakes) -> AsyncIterator[str]:
    """A server with all fake services on one port."""
    server = grpc.aio.server(options=(("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", 64 << 20)))
    add = [
        (rollout_service_pb2_grpc, "RolloutService"),
        (agent_service_pb2_grpc, "AgentService"),
        (terminal_service_pb2_grpc, "TerminalService"),
        (inference_service_pb2_grpc, "InferenceService"),
        (sandbox_service_pb2_grpc, "SandboxService"),
        (process_service_pb2_grpc, "ProcessService"),
        (file_service_pb2_grpc, "FileService"),
    ]
    streaming = {
        "WatchRollout", "WatchGroup", "GetTrajectory", "ExportTrajectories", "CheckAgent", "GetTokenizer", "Generate",
        "WatchStats", "WatchSandbox", "WatchProcess", "ReadFile", "ReadTree", "PrepareSnapshot", "ForkSandboxes",
        "Step",
    }  # fmt: skip
    uploads = {"UpdateWeights", "WriteFile", "WriteTree", "WriteStdin", "LoadAdapter"}
    for module, name in add:
        servicer = _fake(fakes, getattr(module, f"{name}Servicer"), streaming, uploads)
        getattr(module, f"add_{name}Servicer_to_server")(servicer, server)
    intercept_service_pb2_grpc.add_InterceptServiceServicer_to_server(_fake_gate(fakes), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(None)


@pytest.fixture
async def ps(address: str) -> AsyncIterator[Penstock]:
    """A client whose four services are the fakes."""
    target = dict.fromkeys(("sandbox", "driver", "interception", "inference"), address)
    async with connect(target, TOKEN) as client:
        yield client


@pytest.fixture(autouse=True)
def _no_surroundings(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """No test sees the environment or the connection file of whoever runs it."""
    for name in ("SANDBOX", "DRIVER", "INTERCEPTION", "INFERENCE"):
        monkeypatch.delenv(f"PENSTOCK_{name}_ADDRESS", raising=False)
    monkeypatch.delenv("PENSTOCK_TOKEN", raising=False)
    monkeypatch.delenv("PENSTOCK_TOKEN_FILE", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture
def gathered() -> Callable[..., Awaitable[list[Any]]]:
    """Everything that an async iterator gives."""

    async def gather(items: AsyncIterator[Any]) -> list[Any]:
        return [item async for item in items]

    return gather


@pytest.fixture(autouse=True)
async def _nothing_left_running() -> AsyncIterator[None]:
    """A test that leaves a task of the client behind fails."""
    yield
    await asyncio.sleep(0)
    left = [task for task in asyncio.all_tasks() if task.get_name().startswith("penstock-")]
    assert not left, left
