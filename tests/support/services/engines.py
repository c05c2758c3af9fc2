"""Real inference services inside a test, each with a scripted engine whose every answer is its own name."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from safetensors.numpy import save

from penstock.inference.v1 import inference_service_pb2 as engine_pb
from penstock.inference.v1 import inference_service_pb2_grpc as engine_grpc
from penstock.ops.v1 import operations_service_pb2_grpc as ops_grpc
from penstock_chassis.auth import Authenticator, Role
from penstock_chassis.channel import connect
from penstock_chassis.operations import Operations
from penstock_chassis.server import Server, watched_by
from penstock_inference.app import build
from penstock_inference.settings import InferenceSettings


class RunningEngine:
    """One inference service, whose every answer is its own name."""

    def __init__(self, address: str, channel: grpc.aio.Channel, stack: AsyncExitStack) -> None:
        self.address = address
        self.stub: Any = engine_grpc.InferenceServiceStub(channel)
        self.operations: Any = ops_grpc.OperationsServiceStub(channel)
        self._stack = stack

    async def stop(self) -> None:
        """It ends at once, and so do its calls."""
        await self._stack.aclose()

    async def pause(self) -> None:
        """Its calls wait."""
        await self.stub.Pause(engine_pb.PauseRequest(mode=engine_pb.PAUSE_MODE_KEEP))

    async def resume(self) -> None:
        await self.stub.Resume(engine_pb.ResumeRequest())

    async def push(self, version: int) -> None:
        """Puts a policy version in force."""
        data = save({"w": np.zeros(1, np.float32)})

        async def frames() -> AsyncIterator[engine_pb.UpdateWeightsRequest]:
            frame = engine_pb.UpdateWeightsRequest
            yield frame(begin=frame.UpdateBegin(policy_version=version, format=engine_pb.WEIGHT_FORMAT_SAFETENSORS))
            yield frame(chunk=data)
            yield frame(commit=frame.UpdateCommit(sha256=sha256(data).digest()))

        await self.stub.UpdateWeights(frames())

    async def waiting(self, count: int) -> None:
        """Returns when so many calls wait there."""
        async for stats in self.stub.WatchStats(engine_pb.WatchStatsRequest()):
            if stats.waiting >= count:
                return


def listed(**running: RunningEngine) -> str:
    """The membership of these engines."""
    return "static:" + ",".join(f"{name}={engine.address}" for name, engine in running.items())


@asynccontextmanager
async def launching(
    folder: Path, model_dir: Path, tokens: Mapping[Role, str] | None = None
) -> AsyncIterator[Callable[..., Any]]:
    """Yields a function that starts engines, which end with the context.

    `model_dir` has their tokenizer. `tokens` are those of the roles; None treats every caller as operator.
    """
    authenticator = Authenticator(tokens or {}, anonymous=tokens is None)
    async with AsyncExitStack() as whole:

        async def started(
            name: str,
            port: int = 0,
            model: Path = model_dir,
            turn: dict[str, Any] | None = None,
            **settings: Any,
        ) -> RunningEngine:
            script = folder / f"{name}.json"
            turns = [turn or {"reply": name, "repeat": True}]
            script.write_text(json.dumps({"strict": False, "turns": turns}))
            loaded = InferenceSettings(
                **{
                    "model_dir": model,
                    "state_dir": folder / name,
                    "anonymous": True,
                    "engine": "scripted",
                    "engine_options": {"script": str(script)},
                    "name": name,
                    **settings,
                }
            )
            stack = await whole.enter_async_context(AsyncExitStack())
            service = await stack.enter_async_context(build(loaded))
            watched = Operations("inference", own_name=name, draining=service.draining)
            server = Server(watched_by(watched, service), authenticator, port=port, stop_s=0.0)
            await stack.enter_async_context(server)
            channel = await stack.enter_async_context(connect(server.address, (tokens or {}).get(Role.OPERATOR)))
            return RunningEngine(server.address, channel, stack)

        yield started
