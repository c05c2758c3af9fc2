"""A replica's process: one engine, controlled by the service over an inherited socket.

    python -m penstock_inference.replicas.child DESCRIPTOR NAME

NAME only identifies it in a process list. It exits when the socket closes, however the service ended.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any

import structlog

from penstock_chassis.errors import Internal, PenstockError
from penstock_chassis.telemetry import logging
from penstock_inference.domain.engine_info import EngineStats
from penstock_inference.domain.weights import PauseMode, UpdatePhases
from penstock_inference.engines.base import Engine
from penstock_inference.engines.checkpoint import parse_safetensors
from penstock_inference.engines.optional_features import (
    Adapters,
    Sleeper,
    StagedUpdates,
    WeightFiles,
    missing_capability,
)
from penstock_inference.engines.registry import open_engine
from penstock_inference.replicas import wire

STATS_INTERVAL_S = 0.25
"""Interval for sending changed counters."""
SIGN_OF_LIFE_S = 1.0
"""Counters are sent at least this often."""
CLOSE_S = 15.0
"""An engine that takes longer to close is abandoned: the process exits."""

_log = structlog.get_logger("penstock.inference")


class Host:
    """Serves one engine on one socket."""

    def __init__(self, engine: Engine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._engine = engine
        self._reader = reader
        self._writer = writer
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._methods: dict[str, Callable[..., Awaitable[Any]]] = {
            "score": engine.score,
            "abort": self._abort,
            "pause": engine.pause,
            "resume": engine.resume,
            "stage": self._stage,
            "switch": self._switch,
            "drop": engine.abort_update,
        }
        if isinstance(engine, Adapters):
            self._methods |= {"load_adapter": engine.load_adapter, "unload_adapter": engine.unload_adapter}
        if isinstance(engine, Sleeper):
            self._methods |= {"sleep": engine.sleep, "wake": engine.wake}

    async def serve(self) -> None:
        """Serve until the service closes the socket."""
        sending = asyncio.create_task(self._send_stats(), name="replica-stats")
        try:
            while (message := await wire.receive(self._reader)) is not None:
                if isinstance(message, wire.Cancel):
                    task = self._calls.get(message.number)
                    if task is not None:
                        task.cancel()
                elif isinstance(message, wire.Call):
                    work = self._generate(message) if message.method == "generate" else self._call(message)
                    task = asyncio.create_task(work, name=f"replica-{message.method}")
                    self._calls[message.number] = task
                    task.add_done_callback(lambda _, number=message.number: self._calls.pop(number))  # type: ignore[misc]
        finally:
            tasks = [sending, *self._calls.values()]
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def _call(self, call: wire.Call) -> None:
        try:
            method = self._methods.get(call.method)
            if method is None:
                raise missing_capability(call.method)
            wire.send(self._writer, wire.Answer(call.number, await method(*call.arguments)))
        except PenstockError as error:
            wire.send(self._writer, wire.Failed.of(call.number, error))
        except Exception as error:  # noqa: BLE001 - sent to the caller
            wire.send(self._writer, wire.Failed.of(call.number, _unexpected(call.method, error)))

    async def _generate(self, call: wire.Call) -> None:
        try:
            async with aclosing(self._engine.generate(*call.arguments)) as events:
                async for event in events:
                    wire.send(self._writer, wire.Answer(call.number, event))
                    await self._writer.drain()
        except ConnectionError:
            return  # the service is gone, which `serve` handles
        except PenstockError as error:
            wire.send(self._writer, wire.Failed.of(call.number, error))
        except Exception as error:  # noqa: BLE001 - sent to the caller
            wire.send(self._writer, wire.Failed.of(call.number, _unexpected(call.method, error)))

    async def _abort(self, request_ids: tuple[str, ...], session_id: str | None, everything: bool) -> int:
        return await self._engine.abort(request_ids=request_ids, session_id=session_id, everything=everything)

    async def _stage(self, stage: wire.Stage) -> None:
        """Check an update completely and keep it ready; an update staged before is dropped."""
        engine = self._engine
        await engine.abort_update()
        await engine.begin_update(stage.version, stage.label, stage.update_format)
        try:
            for file in stage.files:
                if isinstance(engine, WeightFiles):
                    await engine.push_path(file.path)
                    continue
                tensors = parse_safetensors(await asyncio.to_thread(file.path.read_bytes))
                await engine.push_tensors({name: tensors[name] for name in file.names})
            if isinstance(engine, StagedUpdates):
                await engine.stage_update()
        except BaseException:
            await engine.abort_update()
            raise

    async def _switch(self) -> UpdatePhases:
        return await self._engine.commit_update(PauseMode.KEEP)

    async def _send_stats(self) -> None:
        sent: EngineStats | None = None
        due = 0.0
        while True:
            stats, now = self._engine.stats(), time.monotonic()
            if stats != sent or now >= due:
                wire.send(self._writer, wire.Stats(stats))
                sent, due = stats, now + SIGN_OF_LIFE_S
            await asyncio.sleep(STATS_INTERVAL_S)


def _unexpected(method: str, error: Exception) -> Internal:
    _log.exception("a replica's call failed", method=method)
    return Internal(f"the replica failed in {method}: {type(error).__name__}", reason="GENERATION_FAILED")


async def _main(descriptor: int) -> None:
    # Processes that the engine starts must not hold the socket open.
    os.set_inheritable(descriptor, False)
    reader, writer = await asyncio.open_connection(sock=socket.socket(fileno=descriptor))
    order = await wire.receive(reader)
    if not isinstance(order, wire.Open):
        return
    logging.configure(order.level, order.style)
    try:
        engine = await open_engine(order.engine, order.options)
    except PenstockError as error:
        wire.send(writer, wire.Failed.of(0, error))
        await writer.drain()
        return
    try:
        wire.send(writer, wire.Ready(engine.info()))
        await Host(engine, reader, writer).serve()
    finally:
        async with asyncio.timeout(CLOSE_S):
            await engine.aclose()


def main() -> None:
    """Serve, then exit at once without waiting for an engine's threads."""
    status = 1
    try:
        asyncio.run(_main(int(sys.argv[1])))
        status = 0
    except TimeoutError:
        _log.warning("the engine did not close in time", seconds=CLOSE_S)
    except Exception:  # noqa: BLE001 - the process ends here
        _log.exception("the replica failed")
    finally:
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    main()
