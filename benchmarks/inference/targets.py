"""What generates: our service with an engine, vLLM's own HTTP server, and the engines of others without a service."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import aiohttp
import numpy as np
from numpy.typing import NDArray

from benchmarks.inference import models
from benchmarks.inference.servers import READY_S, Server, running
from penstock.client import Penstock, Sampling, connect

VLLM_PYTHON: Final = Path(".venv-vllm/bin/python")
AT_ONCE: Final = 128
"""Most that any target runs at once."""
CACHE_BYTES: Final = 256 << 20
_TOKEN: Final = "benchmark"
_PROGRAM: Final = Path(__file__).with_name("engine_program.py")
_QUIET: Final = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    # Compiling kernels for a model of this size costs minutes and gains nothing.
    "TORCH_COMPILE_DISABLE": "1",
}
_AS_IT_COMES: Final = _QUIET | {"VLLM_PLUGINS": "none"}
"""For vLLM by itself: without the plugin that our service brings (`engines/vllm/waiting.py`)."""
_ARGUMENTS: Final[dict[str, Any]] = {
    "dtype": "float32",
    "enforce_eager": True,
    "block_size": 32,
    "max_model_len": models.CONTEXT,
    "max_num_seqs": AT_ONCE,
    "kv_cache_memory_bytes": CACHE_BYTES,
}
"""What every vLLM here is started with, ours included."""

Prompts = Sequence[NDArray[np.int32]]


@dataclass(frozen=True, slots=True)
class Sample:
    """What came of one load: seconds, tokens, and of each request the seconds to its first token."""

    seconds: float
    tokens: int
    first: Sequence[float]
    cpu_s: float
    """Of the process that was asked, without its workers."""


class Target(ABC):
    """Something that generates."""

    def __init__(self, title: str, server: Server, *, streams: bool = True) -> None:
        self.title = title
        self.server = server
        self.streams = streams
        """Whether a streamed answer is another thing than a whole one."""

    @abstractmethod
    async def wake(self, at_once: int) -> None:
        """After it stood still: whatever a load should not pay for, such as connections."""

    async def load(self, prompts: Prompts, at_once: int, new_tokens: int, *, streamed: bool) -> Sample:
        """All prompts, so many at once."""
        used = self.server.cpu_s()
        seconds, tokens, first = await self._load(prompts, at_once, new_tokens, streamed)
        if tokens != len(prompts) * new_tokens:
            raise RuntimeError(f"{self.title} gave {tokens} tokens for {len(prompts)} prompts")
        return Sample(seconds, tokens, first, self.server.cpu_s() - used)

    @abstractmethod
    async def _load(
        self, prompts: Prompts, at_once: int, new_tokens: int, streamed: bool
    ) -> tuple[float, int, Sequence[float]]: ...


class Program(Target):
    """An engine without a service; the load comes from its own process."""

    async def wake(self, at_once: int) -> None:
        """Nothing sleeps."""

    async def _load(
        self, prompts: Prompts, at_once: int, new_tokens: int, streamed: bool
    ) -> tuple[float, int, Sequence[float]]:
        ids = [prompt.tolist() for prompt in prompts]
        order = {"prompts": ids, "at_once": at_once, "new_tokens": new_tokens, "streamed": streamed}
        said = await self.server.tell(order)
        return said["seconds"], said["tokens"], said["first"]


class Remote(Target):
    """An engine behind a connection; the load comes from here."""

    async def _load(
        self, prompts: Prompts, at_once: int, new_tokens: int, streamed: bool
    ) -> tuple[float, int, Sequence[float]]:
        left = iter(prompts)
        first: list[float] = []
        counts: list[int] = []

        async def worker(left: Iterator[NDArray[np.int32]] = left) -> None:
            for prompt in left:
                began = time.perf_counter()
                heard, count = await self._one(prompt, new_tokens, streamed)
                first.append(heard - began)
                counts.append(count)

        began = time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            for _ in range(at_once):
                tasks.create_task(worker())
        return time.perf_counter() - began, sum(counts), first

    @abstractmethod
    async def _one(self, prompt: NDArray[np.int32], new_tokens: int, streamed: bool) -> tuple[float, int]:
        """When the first token was here, and how many came."""


class Service(Remote):
    """Our inference service, over gRPC."""

    def __init__(self, title: str, server: Server, ps: Penstock) -> None:
        super().__init__(title, server)
        self.ps = ps

    async def wake(self, at_once: int) -> None:
        """Its one connection may have to be made again."""
        await self.ps.inference.info()

    async def _one(self, prompt: NDArray[np.int32], new_tokens: int, streamed: bool) -> tuple[float, int]:
        sampling = Sampling(temperature=1.0, max_tokens=new_tokens)
        if not streamed:
            completion = await self.ps.inference.generate(prompt, sampling)
            return time.perf_counter(), len(completion)
        heard, count = 0.0, 0
        async with aclosing(self.ps.inference.stream(prompt, sampling)) as parts:
            async for part in parts:
                heard, count = heard or time.perf_counter(), len(part)
        return heard, count


class Http(Remote):
    """vLLM's HTTP server, by its endpoint of token ids in and out."""

    def __init__(self, title: str, server: Server, address: str) -> None:
        super().__init__(title, server)
        # Let go before the server does so after 5 s: it may be standing still then, and nobody would be told.
        connector = aiohttp.TCPConnector(limit=AT_ONCE, keepalive_timeout=2.0)
        self._session = aiohttp.ClientSession(address, connector=connector)

    async def wake(self, at_once: int) -> None:
        """A connection for each request: it closes those that were idle for some seconds."""
        async with asyncio.TaskGroup() as tasks:
            for _ in range(at_once):
                tasks.create_task(self._ask_for_health())

    async def answers(self) -> None:
        """Until it does: it announces nothing."""
        ended = asyncio.create_task(self.server.hear())
        try:
            async with asyncio.timeout(READY_S):
                while not ended.done():
                    try:
                        await self._ask_for_health()
                    except aiohttp.ClientError:
                        await asyncio.wait((ended,), timeout=0.5)
                    else:
                        return
                await ended
        finally:
            ended.cancel()

    async def close(self) -> None:
        """The connections."""
        await self._session.close()

    async def _ask_for_health(self) -> None:
        async with self._session.get("/health", raise_for_status=True) as answer:
            await answer.read()

    async def _one(self, prompt: NDArray[np.int32], new_tokens: int, streamed: bool) -> tuple[float, int]:
        sampling = {
            "max_tokens": new_tokens,
            "temperature": 1.0,
            "logprobs": 0,
            "ignore_eos": True,
            "detokenize": False,
        }
        body = {"token_ids": prompt.tolist(), "sampling_params": sampling, "stream": streamed}
        async with self._session.post("/inference/v1/generate", json=body) as answer:
            answer.raise_for_status()
            if not streamed:
                whole = await answer.json()
                return time.perf_counter(), len(whole["choices"][0]["token_ids"])
            heard, count = 0.0, 0
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    choices = json.loads(line[6:])["choices"]
                    if choices and choices[0]["token_ids"]:
                        heard = heard or time.perf_counter()
                        count += len(choices[0]["token_ids"])
            return heard, count


@asynccontextmanager
async def service(
    engine: str,
    model: Path,
    place: Path,
    python: Path = Path(sys.executable),
    extra: Mapping[str, str] | None = None,
    **settings: str,
) -> AsyncIterator[Service]:
    """Our service with an engine; `extra` is environment beside its settings."""
    given = {
        "model_dir": model,
        "engine": engine,
        "port": 0,
        "operator_token": _TOKEN,
        "state_dir": place / f"state-{engine}-{model.name}",
        "max_context_tokens": models.CONTEXT,
        "max_concurrency": AT_ONCE,
        "kv_cache_bytes": CACHE_BYTES,
        "log_level": "warning",
        **settings,
    }
    if engine == "vllm":
        given["engine_options"] = json.dumps({"dtype": "float32", "enforce_eager": "true", "block_size": "32"})
    environment = {f"PENSTOCK_INFERENCE_{name.upper()}": str(value) for name, value in given.items()}
    environment |= extra or {}
    argv = [python.absolute(), "-m", "penstock_inference"]
    log = place / f"{engine}-{model.name}.log"
    async with (
        running(f"our {engine}", argv, log, environment=_QUIET | environment) as server,
        connect({"inference": server.ready["address"]}, _TOKEN) as ps,
    ):
        yield Service(f"Penstock, {engine}", server, ps)


@asynccontextmanager
async def program(
    kind: str, title: str, model: Path, place: Path, extra: Mapping[str, str] | None = None
) -> AsyncIterator[Program]:
    """An engine of others, without a service; `extra` is environment."""
    start: Mapping[str, object] = {"model": str(model), "arguments": _ARGUMENTS}
    argv = [VLLM_PYTHON.absolute(), _PROGRAM, kind]
    async with running(
        title, argv, place / f"{kind}.log", environment={**_AS_IT_COMES, **(extra or {})}, start=start
    ) as server:
        yield Program(title, server, streams=kind != "transformers")


@asynccontextmanager
async def http(model: Path, place: Path) -> AsyncIterator[Http]:
    """vLLM's own server."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    flags = [
        part
        for name, value in _ARGUMENTS.items()
        for part in ([f"--{name.replace('_', '-')}"] + ([] if value is True else [str(value)]))
    ]
    argv = [VLLM_PYTHON.absolute(), "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--port", port]
    argv += ["--host", "127.0.0.1", "--enable-scale-out", "--logprobs-mode", "processed_logprobs", *flags]
    argv += ["--uvicorn-log-level", "warning", "--generation-config", "vllm", "--skip-tokenizer-init"]
    log = place / "http.log"
    async with running("vLLM's HTTP server", argv, log, environment=_AS_IT_COMES, announces=False) as server:
        target = Http("vLLM, HTTP", server, f"http://127.0.0.1:{port}")
        try:
            await target.answers()
            yield target
        finally:
            await target.close()
