"""Tree operations of a local sandbox: jobs of its helper, streamed through a pipe.

Invariants: the job runs as the sandbox's user inside the sandbox; the service only moves bytes. A reader that stops
early ends the job (its pipe breaks); descriptors are closed on every exit path.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import cast

from penstock_sandbox.backends.local.channel import Reply
from penstock_sandbox.backends.local.spawner import wire
from penstock_sandbox.domain.errno import Refused

_CHUNK = 256 * 1024
_RESULT_LIMIT = 64 * 1024

AskHelper = Callable[[wire.Message, Sequence[int]], Awaitable[Reply]]


async def run(helper: AskHelper, job: wire.Message, descriptors: Sequence[int] = ()) -> wire.Message:
    """Runs a job to its end; returns its result. Raises Refused."""
    result, result_write = os.pipe()
    try:
        try:
            await helper({**job, "op": "job"}, [result_write, *descriptors])
        finally:
            os.close(result_write)
        return await _outcome(result)
    finally:
        os.close(result)


async def stream(helper: AskHelper, job: wire.Message) -> AsyncGenerator[bytes, None]:
    """Runs a job that writes a stream; yields its chunks. Raises Refused at the end when the job failed."""
    result, result_write = os.pipe()
    data, data_write = os.pipe()
    try:
        try:
            await helper({**job, "op": "job"}, [result_write, data_write])
        finally:
            os.close(result_write)
            os.close(data_write)
        os.set_blocking(data, False)
        pending = bytearray()
        while chunk := await _read(data):
            pending += chunk
            if len(pending) >= _CHUNK:
                yield bytes(pending)
                pending.clear()
        if pending:
            yield bytes(pending)
        await _outcome(result)
    finally:
        os.close(data)
        os.close(result)


async def _outcome(descriptor: int) -> wire.Message:
    os.set_blocking(descriptor, False)
    answer = bytearray()
    while chunk := await _read(descriptor):
        answer += chunk
        if len(answer) > _RESULT_LIMIT:
            break
    if not answer:
        raise Refused(errno.EINTR, "the operation was killed inside the sandbox")
    try:
        result = cast(wire.Message, json.loads(answer))
    except ValueError:
        raise Refused(errno.EINTR, "the operation was killed inside the sandbox") from None
    if "errno" in result:
        raise Refused(result["errno"], result["what"])
    return result


async def _read(descriptor: int) -> bytes:
    while True:
        try:
            return os.read(descriptor, _CHUNK)
        except BlockingIOError:
            pass
        loop = asyncio.get_running_loop()
        ready = asyncio.Event()
        loop.add_reader(descriptor, ready.set)
        try:
            await ready.wait()
        finally:
            loop.remove_reader(descriptor)
