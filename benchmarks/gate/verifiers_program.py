"""The interception server of verifiers, as a program; run by the interpreter of an environment that has it.

`start` has the engine's port, the directory of a tokenizer, and whether it is to make tokens (`train`) or to pass on
what it is asked (`relay`). `open` and `close` are its own register and unregister, without what its environments do.
"""

import asyncio
import json
import logging
import sys
from typing import Any

import uvloop
from renderers import Qwen3RendererConfig  # type: ignore[import-not-found]
from verifiers.v1.clients import (
    EvalClientConfig,
    ModelContext,
    TrainClientConfig,
)
from verifiers.v1.interception.server import InterceptionServer
from verifiers.v1.session import RolloutSession
from verifiers.v1.task import TaskData
from verifiers.v1.trace import AgentConfig, AgentInfo, Trace, TraceTask


def _client(start: dict[str, Any]) -> Any:
    root = f"http://127.0.0.1:{start['engine']}"
    if start["kind"] == "relay":
        return EvalClientConfig(base_url=f"{root}/v1", api_key_var="BENCH_KEY")
    return TrainClientConfig(
        base_url=root,
        api_key_var="BENCH_KEY",
        renderer=Qwen3RendererConfig(),
        renderer_model_name=start["tokenizer"],
    )


async def main() -> None:
    """One line of JSON in, one out."""
    logging.disable(logging.WARNING)
    reader = asyncio.StreamReader(limit=1 << 24)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    start = json.loads(await reader.readline())
    server = InterceptionServer()
    async with server:
        context = ModelContext(model="policy", client=_client(start))
        _say({"port": server.port})
        while line := await reader.readline():
            told = json.loads(line)
            if told["do"] == "open":
                _say({"secrets": [_open(server, context) for _ in range(told["count"])]})
            else:
                for model, state in told["secrets"]:
                    server.unregister(model, state)
                _say({})


def _open(server: Any, context: Any) -> list[str]:
    task = TraceTask(type="bench", data=TaskData())
    trace = Trace(task=task, agent=AgentInfo(config=AgentConfig()))
    return list(server.register(RolloutSession(ctx=context, trace=trace)))


def _say(what: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    uvloop.run(main())
