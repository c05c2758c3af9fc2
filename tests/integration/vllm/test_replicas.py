"""Two vLLMs behind one service."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import pytest
import pytest_asyncio
from tests.integration.vllm.conftest import Served, first_tokens, tokens_of
from tests.support import vllm_models as models
from tests.support.services import replicas
from tests.support.services.processes import children_of

from penstock.inference.v1 import inference_service_pb2_grpc as rpc
from penstock_inference.testing import open_inference

pytestmark = pytest.mark.asyncio(loop_scope="module")

GREEDY = {"temperature": 0, "max_tokens": 16, "min_tokens": 16}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def two(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    """A service with two replicas, as small as they get."""
    directory = tmp_path_factory.mktemp("two")
    opening = open_inference(
        models.write(directory / "model"),
        directory / "state",
        engine="vllm",
        replicas=2,
        max_concurrency=8,
        kv_cache_bytes=64 << 20,
        log_level="warning",
        engine_options={"dtype": "float32", "enforce_eager": "true", "block_size": "32"},
    )
    async with opening as opened:
        yield Served(rpc.InferenceServiceStub(opened.channel), directory, opened.address)


def engine_core(replica: str) -> int:
    """The process of vLLM's that a replica's own process started."""
    for pid in children_of(replicas.processes()[replica]):
        with suppress(FileNotFoundError, ProcessLookupError):
            if "EngineCore" in Path(f"/proc/{pid}/comm").read_text() + Path(f"/proc/{pid}/cmdline").read_text():
                return pid
    raise AssertionError(f"{replica} has no engine core")


async def busy(two: Served) -> str:
    """The replica that has something to do, once there is one."""
    stats = await two.until(lambda stats: any(each.load_tokens for each in stats.replicas))
    return next(each.name for each in stats.replicas if each.load_tokens)  # type: ignore[no-any-return]


async def all_live(two: Served) -> list[int]:
    """Until all are; how often each was started again."""
    stats = await two.until(lambda stats: all(each.live for each in stats.replicas))
    return [each.restarts for each in stats.replicas]


@pytest.mark.requirement("R22", "R43", "R87")
@pytest.mark.parametrize("victim", ["process", "engine core"])
async def test_call_continues_with_the_other_vllm_and_the_dead_one_catches_up(two: Served, victim: str) -> None:
    """Whichever of its processes dies; an update meanwhile is in force at once, for it too."""
    await all_live(two)
    old = await two.push(models.random_policy(5))
    request = two.endless(temperature=0)
    events = aiter(two.stub.Generate(request))
    told = await first_tokens(events)
    name = await busy(two)
    restarts = (await all_live(two))[int(name[1:])]
    os.kill(replicas.processes()[name] if victim == "process" else engine_core(name), signal.SIGKILL)
    # What is told meanwhile is read meanwhile, up to the first tokens of the update.
    rest = asyncio.ensure_future(tokens_of(events, old + 1))
    await two.until(lambda stats: not all(each.live for each in stats.replicas))
    new = await two.push(models.random_policy(6))
    told += await rest
    assert new == old + 1 and await two.abort(request) == 1
    told += [event async for event in events]
    span = told[-1].done.completion.span
    assert b"".join(event.delta.span.token_ids for event in told) == span.token_ids
    assert [v.policy_version for v in span.versions] == [old, new]
    assert (await all_live(two))[int(name[1:])] == restarts + 1
    long = two.endless(temperature=0)
    long.session_id = "one"
    holding = aiter(two.stub.Generate(long))
    await first_tokens(holding)
    # The other has less to do, and no prefix is known.
    other = await two.complete(two.request(**GREEDY))
    assert [v.policy_version for v in other.span.versions] == [new]
    assert await two.abort(long) == 1
    done = [event async for event in holding][-1].done.completion
    assert [v.policy_version for v in done.span.versions] == [new]
    # Each tells a moment later what it did.
    await two.until(lambda stats: all(each.sampled_tokens for each in stats.replicas))
