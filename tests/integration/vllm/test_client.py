"""The Python client against the real vLLM: what a trainer does with an engine on accelerators."""

from __future__ import annotations

from collections.abc import AsyncIterator

import numpy as np
import pytest
import pytest_asyncio
from safetensors.numpy import save_file
from tests.integration.vllm.conftest import Served
from tests.support import vllm_models as models
from tests.support.exported import turn_row

from penstock.analysis.logprob_diff import compare
from penstock.analysis.logprob_diff_rows import RowCounts, with_scores
from penstock.client import Adapter, Penstock, Sampling, connect
from penstock.client.errors import InvalidArgument, NotFound

pytestmark = pytest.mark.asyncio(loop_scope="session")

TOLERANCE = 5e-3
PROMPT = np.arange(20, 60)
GREEDY = Sampling(temperature=0.0, max_tokens=16, min_tokens=16)


@pytest_asyncio.fixture(loop_scope="session")
async def ps(service: Served) -> AsyncIterator[Penstock]:
    """A client of the one engine."""
    async with connect({"inference": service.address}) as client:
        yield client


async def greedy(ps: Penstock, adapter: str = "") -> list[int]:
    completion = await ps.inference.generate(PROMPT, GREEDY, adapter=adapter)
    assert completion.token_ids is not None
    return [int(token) for token in completion.token_ids]


@pytest.mark.requirement("R63", "R87")
@pytest.mark.usefixtures("adapters")
async def test_adapters_are_loaded_listed_scored_and_unloaded(service: Served, ps: Penstock) -> None:
    """Pushed or by path, beside the base weights, each with its own version."""
    await ps.inference.update_weights(service.version(), models.random_policy(9))
    base = await greedy(ps)
    directory = service.directory / "adapters" / "by-path"
    directory.mkdir(parents=True)
    save_file(models.adapter(2), directory / "adapter_model.safetensors")
    (directory / "adapter_config.json").write_text(models.ADAPTER_CONFIG_JSON)
    try:
        pushed = await ps.inference.load_adapter("one", 4, models.adapter(1), models.ADAPTER_CONFIG)
        assert pushed == Adapter("one", 4, models.RANK)
        named = await ps.inference.load_adapter_from("two", 5, "by-path", mode="wait")
        assert await ps.inference.adapters() == [pushed, named]
        assert len({tuple(await greedy(ps, name)) for name in ("", "one", "two")}) == 3
        completion = await ps.inference.generate(PROMPT, Sampling(max_tokens=12), adapter="one", min_version=4)
        assert [span.policy_version for span in completion.versions] == [4]
        whole = np.concatenate([PROMPT, completion.token_ids])
        scored = await ps.inference.score(whole, PROMPT.size, adapter="one")
        assert completion.logprobs is not None and np.abs(scored - completion.logprobs).max() < TOLERANCE
        rows = [turn_row("call", PROMPT.tolist(), completion)]
        gap = compare([one async for one in with_scores(rows, ps.inference, RowCounts(), adapter="one")])
        assert (gap.versions[0].policy_version, gap.overall.tokens) == (4, 12) and gap.overall.max_abs < TOLERANCE
        with pytest.raises(NotFound):
            _ = [one async for one in with_scores(rows, ps.inference, RowCounts(), adapter="nobody")]
    finally:
        for name in ("one", "two", "two"):
            await ps.inference.unload_adapter(name)
    assert await ps.inference.adapters() == [] and await greedy(ps) == base


@pytest.mark.requirement("R63", "R87")
async def test_a_trainer_moves_weights_itself_or_thinks_better_of_it(service: Served, ps: Penstock) -> None:
    """The four calls as one block; what is not committed changes nothing."""
    policy = models.random_policy(13)
    await ps.inference.update_weights(service.version(), policy)
    expected = await greedy(ps)
    in_force = (await ps.inference.update_weights(service.version(), models.random_policy(14))).policy_version
    before = await greedy(ps)
    directory = service.directory / "client-transfer"
    directory.mkdir()
    save_file(policy, directory / "new.safetensors")
    assert (await ps.inference.info()).transfer_backends == ("files",)
    await ps.inference.init_transfer("files", {"directory": str(directory)})
    async with await ps.inference.start_transfer(service.version(), mode="wait") as transfer:
        await transfer.tensors({"file": "new.safetensors"})
    assert (await ps.inference.info()).policy_version == in_force and await greedy(ps) == before
    with pytest.raises(InvalidArgument) as refused:
        async with await ps.inference.start_transfer(service.version()) as transfer:
            await transfer.tensors({"file": "nothing.safetensors"})
    assert refused.value.reason == "TRANSFER_REFUSED" and await greedy(ps) == before
    version = service.version()
    async with await ps.inference.start_transfer(version, idle_timeout=60) as transfer:
        await transfer.tensors({"file": "new.safetensors"})
        update = await transfer.commit()
    assert update.policy_version == version and update.pause is not None
    assert await greedy(ps) == expected
    async for stats in ps.inference.watch_stats():
        assert stats.policy_version == version and stats.sampled_tokens > 0
        break
    await ps.inference.update_weights(service.version(), policy)
