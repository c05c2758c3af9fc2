"""A real interception service on free ports, a trainer on its stream, and a tiny tokenizer; no engine is needed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import numpy as np
import openai
import pytest
import trustme

from penstock.chat.v1 import chat_pb2, completion_pb2
from penstock.interception.v1 import intercept_service_pb2 as intercept
from penstock.interception.v1 import intercept_service_pb2_grpc as intercept_grpc
from penstock.interception.v1 import interception_pb2
from penstock.interception.v1 import rollout_gate_service_pb2 as gate
from penstock.interception.v1 import rollout_gate_service_pb2_grpc as gate_grpc
from penstock.trajectory.v1 import trajectory_pb2
from penstock_chassis.auth import Authenticator, Role
from penstock_chassis.channel import connect
from penstock_chassis.operations import Operations
from penstock_chassis.server import Server, watched_by
from penstock_codec import Codec, tiny_tokenizer
from penstock_codec.tokenizer_files import TokenizerFiles
from penstock_interception.app import build
from penstock_interception.settings import InterceptionSettings

OPERATOR, TRAINER, OBSERVER = "operator-token-1", "trainer-token-1", "observer-token-1"
TEXTS = ["You are a shell agent.", "list the files", '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}']


@dataclass
class Rollout:
    """An open rollout as its agent knows it."""

    rollout_id: str
    base_url: str
    token: str

    def client(self, **options: Any) -> openai.AsyncOpenAI:
        """The real SDK, pointed at the ingress."""
        options.setdefault("max_retries", 0)
        return openai.AsyncOpenAI(base_url=self.base_url, api_key=self.token, **options)


class Trainer:
    """A trainer on its stream; every frame that comes is kept in order."""

    def __init__(self, channel: grpc.aio.Channel, codec: Codec, **hello: Any) -> None:
        hello.setdefault("credits", intercept.Credits(calls=64))
        hello.setdefault("identity", "test")
        self.codec = codec
        self._channel = channel
        self._hello = hello
        self.frames: list[intercept.InterceptResponse] = []
        self._pending: asyncio.Queue[intercept.ModelCall] = asyncio.Queue()
        self._news = asyncio.Condition()
        self.error: grpc.aio.AioRpcError | None = None
        self.over = asyncio.Event()

    async def start(self) -> Trainer:
        self._stream = intercept_grpc.InterceptServiceStub(self._channel).Intercept()
        await self.send(hello=intercept.Hello(**self._hello))
        self._reader = asyncio.create_task(self._read())
        await self.frame("welcome")
        return self

    @property
    def session_id(self) -> str:
        return self.frames[0].welcome.session_id

    async def send(self, **frame: Any) -> None:
        await self._stream.write(intercept.InterceptRequest(**frame))

    async def call(self) -> intercept.ModelCall:
        """The next call."""
        return await self._pending.get()

    async def frame(self, kind: str, count: int = 1) -> Any:
        """The `count`-th frame of a kind, once it has come."""
        async with self._news:
            await self._news.wait_for(lambda: len(self._of(kind)) >= count or self.over.is_set())
        found = self._of(kind)
        if len(found) < count:
            raise AssertionError(f"the stream ended without {kind}: {self.error}")
        return getattr(found[count - 1], kind)

    def _of(self, kind: str) -> list[intercept.InterceptResponse]:
        return [frame for frame in self.frames if frame.WhichOneof("frame") == kind]

    def completion(self, text: str, **options: Any) -> completion_pb2.Completion:
        """Tokens for a text, ended as the model ends a turn."""
        ids = np.asarray([*self.codec.encode(text), self.codec.end_of_turn_id], "<i4")
        return tokens_completion(ids, **options)

    def result(self, call: intercept.ModelCall, text: str, **options: Any) -> intercept.CallResult:
        return intercept.CallResult(
            call_id=call.call_id, lease_id=call.lease_id, completion=self.completion(text, **options)
        )

    async def deliver(self, *results: intercept.CallResult) -> intercept.ResultsAcknowledged:
        """Sends results and waits for what became of them."""
        before = len(self._of("acknowledged"))
        await self.send(results=intercept.Results(results=results))
        acknowledged: intercept.ResultsAcknowledged = await self.frame("acknowledged", before + 1)
        return acknowledged

    async def answer(self, text: str, **options: Any) -> intercept.ModelCall:
        """Answers the next call and returns it."""
        call = await self.call()
        acknowledged = await self.deliver(self.result(call, text, **options))
        assert list(acknowledged.accepted_call_ids) == [call.call_id], acknowledged
        return call

    async def goodbye(self) -> None:
        await self.send(goodbye=intercept.Goodbye(reason="done"))
        await self._stream.done_writing()
        await self.over.wait()

    def cut(self) -> None:
        """The stream breaks."""
        self._stream.cancel()

    async def aclose(self) -> None:
        self._stream.cancel()
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)

    async def _read(self) -> None:
        try:
            async for frame in self._stream:
                self.frames.append(frame)
                for call in frame.calls.calls:
                    self._pending.put_nowait(call)
                async with self._news:
                    self._news.notify_all()
        except grpc.aio.AioRpcError as error:
            self.error = error
        except asyncio.CancelledError:
            pass
        finally:
            self.over.set()
            async with self._news:
                self._news.notify_all()


def tokens_completion(
    ids: Sequence[int] | np.ndarray[Any, Any],
    *,
    finish: chat_pb2.FinishReason.ValueType = chat_pb2.FINISH_REASON_STOP,
    version: int = 1,
    logprobs: Sequence[float] | None = None,
) -> completion_pb2.Completion:
    array = np.asarray(ids, dtype="<i4")
    values = np.asarray(logprobs if logprobs is not None else [-0.5] * array.size, dtype="<f4")
    span = completion_pb2.TokenSpan(
        token_ids=array.tobytes(),
        count=array.size,
        logprobs=values.tobytes(),
        logprobs_mode=completion_pb2.LOGPROBS_MODE_PROCESSED,
        versions=[completion_pb2.PolicyVersionSpan(policy_version=version, start=0, end=array.size)],
    )
    return completion_pb2.Completion(span=span, finish_reason=finish, engine="test", engine_version="1")


class Service:
    """A running interception service and the clients that a test needs."""

    def __init__(self, channel: grpc.aio.Channel, address: str, codec: Codec, stack: AsyncExitStack) -> None:
        self.channel = channel
        self.address = address
        self.codec = codec
        self.gate = gate_grpc.RolloutGateServiceStub(channel)
        self.intercept = intercept_grpc.InterceptServiceStub(channel)
        self._stack = stack
        self._opened = 0
        self.ingress = ""
        # The service's own inside, for tests that look at what is left over.
        self.interceptor: Any = None

    async def open(self, rollout_id: str | None = None, **options: Any) -> Rollout:
        """Opens a rollout in gate mode on the tiny tokenizer."""
        self._opened += 1
        rollout_id = rollout_id or f"rollout-{self._opened}"
        options.setdefault("request_id", f"open-{rollout_id}")
        options.setdefault("mode", interception_pb2.MODE_INTERCEPTION_GATE)
        options.setdefault("source", tiny_source())
        answer = await self.gate.OpenRollout(gate.OpenRolloutRequest(rollout_id=rollout_id, **options))
        self.ingress = answer.ingress_address
        path = answer.endpoints[0].base_path
        return Rollout(rollout_id, f"http://{answer.ingress_address}{path}", answer.token)

    async def close(self, rollout_id: str, reason: str = "AGENT_EXITED") -> gate.GateRollout:
        answer = await self.gate.CloseRollout(gate.CloseRolloutRequest(rollout_id=rollout_id, reason=reason))
        return answer.rollout

    async def trainer(self, **hello: Any) -> Trainer:
        trainer = await Trainer(self.channel, self.codec, **hello).start()
        self._stack.push_async_callback(trainer.aclose)
        return trainer

    async def capture(self, rollout_id: str, **options: Any) -> trajectory_pb2.Trajectory:
        whole = trajectory_pb2.Trajectory()
        async for fragment in self.gate.GetCapture(gate.GetCaptureRequest(rollout_id=rollout_id, **options)):
            whole.MergeFrom(fragment.trajectory)
        return whole


def tiny_source() -> interception_pb2.ModelSource:
    return interception_pb2.ModelSource(tokenizer=interception_pb2.ModelSource.Tokenizer(name="tiny"))


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    """A plain HTTP client."""
    async with aiohttp.ClientSession() as session:
        yield session


@pytest.fixture(scope="session", autouse=True)
def one_authority(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No ingress here speaks TLS, and the SDKs' clients read 150 roots each: 30 to 90 ms of a processor's time."""
    file = tmp_path_factory.mktemp("authority") / "ca.pem"
    with pytest.MonkeyPatch.context() as environment:
        file.write_text(trustme.CA().cert_pem.bytes().decode())
        environment.setenv("SSL_CERT_FILE", str(file))
        yield


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model's tokenizer files."""
    directory = tmp_path_factory.mktemp("tiny")
    tiny_tokenizer.build(TEXTS).write(directory)
    return directory


@pytest.fixture
def settings(tmp_path: Path, tokenizer_dir: Path) -> Callable[..., InterceptionSettings]:
    """Settings for a service of this test."""

    def make(**changes: Any) -> InterceptionSettings:
        values: dict[str, Any] = {
            "port": 0,
            "ingress_port": 0,
            "state_dir": tmp_path / "state",
            "operator_token": OPERATOR,
            "trainer_token": TRAINER,
            "observer_token": OBSERVER,
            "tokenizers": {"tiny": tokenizer_dir},
            "inference_address": "",
        }
        return InterceptionSettings(**{**values, **changes})

    return make


Start = Callable[..., Awaitable[Service]]


@asynccontextmanager
async def running(made: InterceptionSettings, codec: Codec) -> AsyncIterator[Service]:
    """The service, wired and served as `run` does it."""
    async with AsyncExitStack() as stack:
        service = await stack.enter_async_context(build(made))
        tokens = {Role.OPERATOR: OPERATOR, Role.TRAINER: TRAINER, Role.OBSERVER: OBSERVER}
        watched = Operations("interception", service.troubles, members=service.members, draining=service.draining)
        server = await stack.enter_async_context(
            Server(watched_by(watched, service), Authenticator(tokens), stop_s=0.0)
        )
        channel = await stack.enter_async_context(connect(server.address, TRAINER))
        made_service = Service(channel, server.address, codec, stack)
        made_service.ingress = service.endpoints["ingress"]
        servicer: Any = service.registrations[0][0]
        made_service.interceptor = servicer._interceptor
        yield made_service


@pytest.fixture(scope="session")
def codec(tokenizer_dir: Path) -> Codec:
    """The tiny model's codec, which holds nothing of what it was used for."""
    return Codec.load(TokenizerFiles.from_directory(tokenizer_dir))


@pytest.fixture
def serving(
    settings: Callable[..., InterceptionSettings], codec: Codec
) -> Callable[..., AbstractAsyncContextManager[Service]]:
    """Services one after the other on one state directory, for tests that end them themselves."""
    return lambda **changes: running(settings(**changes), codec)


@pytest.fixture
async def start(settings: Callable[..., InterceptionSettings], codec: Codec) -> AsyncIterator[Start]:
    """Starts services that end with the test."""
    async with AsyncExitStack() as stack:

        async def starter(**changes: Any) -> Service:
            return await stack.enter_async_context(running(settings(**changes), codec))

        yield starter


@pytest.fixture
async def service(start: Start) -> Service:
    """A service with default settings."""
    return await start()
