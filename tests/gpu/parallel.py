"""vLLM on two GPUs: one model in two parts, two copies of it, and two engines."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.gpu import serving


@pytest.mark.requirement("R82", "R87")
@pytest.mark.parametrize("kind", ["tensor_parallel_size", "data_parallel_size"])
async def test_two_gpus_sample_by_the_weights_in_force(tmp_path: Path, kind: str) -> None:
    """Each rank loads its own part of a push, or all of it."""
    async with serving.engine(tmp_path, options={kind: "2", "enforce_eager": "true"}) as ps:
        await serving.assert_sampled_by(ps, 0, 0)
        await ps.inference.update_weights(1, serving.policy(1))
        await serving.assert_sampled_by(ps, 1, 1)


@pytest.mark.requirement("R22", "R87")
async def test_replicas_each_have_their_own_gpu(tmp_path: Path) -> None:
    """Both answer, and an update is in force on both."""
    devices = ["0", "1"]
    options = {"enforce_eager": "true"}
    async with serving.engine(tmp_path, options=options, replicas=2, replica_devices=devices) as ps:
        await ps.inference.update_weights(1, serving.policy(1))
        await serving.assert_sampled_by(ps, 1, 1)
        async for stats in ps.inference.watch_stats():
            if all(replica.sampled_tokens for replica in stats.replicas):
                assert len(stats.replicas) == len(devices) and stats.policy_version == 1
                break
