"""A replica is killed at each step of an update: the others and it end up with one policy, the old or the new."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.services import replicas

from penstock_chassis.errors import PenstockError, Unavailable
from penstock_inference.engines.base import Done, FinishReason, GenerateRequest, PauseMode, Sampling, TokenIds
from penstock_inference.engines.continuation import MAX_DEATHS
from penstock_inference.replicas.pool import ReplicaPool

PROMPT = np.arange(10, 40, dtype=np.int32)
GREEDY_300 = Sampling(max_tokens=300, temperature=0.0)


async def complete(pool: ReplicaPool, name: str, tokens: int = 16, stream: bool = False) -> Done:
    """A greedy completion."""
    wanted = GenerateRequest(name, PROMPT, Sampling(max_tokens=tokens, temperature=0.0), stream=stream)
    done = [event async for event in pool.generate(wanted)][-1]
    assert isinstance(done, Done)
    return done


async def by_each(pool: ReplicaPool) -> dict[str, TokenIds]:
    """What each replica completes by itself."""
    answers = {}
    for life in pool._supervisor.lives():
        wanted = GenerateRequest(f"by-{life.name}", PROMPT, Sampling(max_tokens=16, temperature=0.0), stream=False)
        (done,) = [event async for event in life.generate(wanted)]
        assert isinstance(done, Done)
        answers[life.name] = done.token_ids
    return answers


@pytest.mark.requirement("R23", "R43", "R87")
@pytest.mark.parametrize(
    ("when", "step"),
    [
        ("before", "stage"),
        ("after", "stage"),
        ("before", "pause"),
        ("after", "pause"),
        ("before", "switch"),
        ("after", "switch"),
        ("before", "resume"),
        ("after", "resume"),
    ],
)
async def test_replica_killed_during_an_update_returns_with_the_new_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str, step: str
) -> None:
    """The update is in force, the calls in flight end, and the old one answers nobody after it."""
    trap = replicas.Trap(monkeypatch)
    async with replicas.pool(tmp_path) as pool:
        await replicas.push(pool, tmp_path, 1, seed=1)
        calls = [asyncio.create_task(complete(pool, f"c{n}", 400, stream=bool(n % 2))) for n in range(4)]
        trap.set(when, "r0", step)
        await replicas.push(pool, tmp_path, 2, seed=2)
        assert set((await replicas.versions(pool)).values()) == {2}
        assert (await complete(pool, "new")).version_spans[0].policy_version == 2
        for call in calls:
            done = await call
            assert done.token_ids.size == 400
            # A fast machine ends some before the update is in force; none goes back to the old policy.
            assert [span.policy_version for span in done.version_spans] in ([1], [1, 2], [2])
        assert (await replicas.all_live(pool)).replicas[0].restarts == 1
        assert await replicas.versions(pool) == {"r0": 2, "r1": 2}
        first, second = (await by_each(pool)).values()
        assert first.tolist() == second.tolist()


@pytest.mark.requirement("R23", "R87")
@pytest.mark.parametrize("step", ["stage", "switch"])
async def test_an_update_that_no_replica_lives_to_take_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """UNAVAILABLE with a delay; all come back with the old policy, and the same push then succeeds."""
    trap = replicas.Trap(monkeypatch)
    async with replicas.pool(tmp_path) as pool:
        await replicas.push(pool, tmp_path, 1, seed=1)
        before = (await complete(pool, "before")).token_ids.tolist()
        for name in ("r0", "r1"):
            trap.set("before", name, step)
        with pytest.raises(Unavailable) as caught:
            await replicas.push(pool, tmp_path, 2, seed=2)
        assert caught.value.reason == "ENGINE_DIED" and caught.value.retry_after_s
        assert pool.info().policy_version == 1
        await replicas.all_live(pool)
        assert await replicas.versions(pool) == {"r0": 1, "r1": 1}
        assert [ids.tolist() for ids in (await by_each(pool)).values()] == [before, before]
        await replicas.push(pool, tmp_path, 2, seed=2)
        assert await replicas.versions(pool) == {"r0": 2, "r1": 2}


@pytest.mark.requirement("R43")
async def test_replica_killed_while_catching_up_is_restarted_until_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It never gets a request with other weights than the others."""
    trap = replicas.Trap(monkeypatch)
    async with replicas.pool(tmp_path) as pool:
        await replicas.push(pool, tmp_path, 1, seed=1)
        trap.set("before", "r0", "stage")
        trap.set("after", "r0", "switch")
        replicas.kill("r0")
        await replicas.changed(pool)
        assert (await replicas.all_live(pool)).replicas[0].restarts == 3
        assert await replicas.versions(pool) == {"r0": 1, "r1": 1}


@pytest.mark.requirement("R43")
async def test_absent_replica_returns_with_the_update_it_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when it is already catching up with the one before, and also its pause."""
    async with replicas.pool(tmp_path) as pool:
        replicas.kill("r0")
        await replicas.changed(pool)
        for version in (1, 2, 3):
            await replicas.push(pool, tmp_path, version, seed=version)
        await pool.pause(PauseMode.KEEP)
        waiting = asyncio.create_task(complete(pool, "waiting"))
        assert (await replicas.all_live(pool)).paused
        assert not waiting.done()
        await pool.resume()
        assert (await waiting).version_spans[0].policy_version == 3
        assert await replicas.versions(pool) == {"r0": 3, "r1": 3}


@pytest.mark.requirement("R23", "R43")
async def test_a_replica_that_hangs_is_killed_and_its_calls_go_on_elsewhere(tmp_path: Path) -> None:
    """Stopped in the middle of a call, it says nothing more and does not end by itself."""
    async with replicas.pool(tmp_path, silence_s=10.0) as pool:
        alone = (await complete(pool, "alone", 300)).token_ids.tolist()
        calls = [pool.generate(GenerateRequest(f"c{n}", PROMPT, GREEDY_300, stream=True)) for n in range(2)]
        for call in calls:  # one each
            await anext(call)
        replicas.stop("r0")
        dones = [[event async for event in call][-1] for call in calls]
        assert [done.token_ids.tolist() for done in dones if isinstance(done, Done)] == [alone, alone]
        await replicas.push(pool, tmp_path, 1, seed=1)
        stats = await replicas.all_live(pool)
        assert [each.restarts for each in stats.replicas] == [1, 0]


@pytest.mark.requirement("R22", "R43")
async def test_killing_all_replicas_mid_call_fails_no_continuable_call(tmp_path: Path) -> None:
    """In-flight calls wait for the first that comes back; who comes meanwhile is told when to come again."""
    async with replicas.pool(tmp_path) as pool:
        alone = (await complete(pool, "alone", 300)).token_ids.tolist()
        streams = [asyncio.create_task(complete(pool, f"c{n}", 300, stream=bool(n % 2))) for n in range(6)]
        probe = pool.generate(GenerateRequest("probe", PROMPT, Sampling(max_tokens=3000, temperature=0.0)))
        await anext(probe)
        for name in ("r0", "r1"):
            replicas.kill(name)
            await replicas.changed(pool)
        with suppress(PenstockError):
            late = await complete(pool, "late")
            assert late.token_ids.tolist() == alone[:16]
        assert [(await stream).token_ids.tolist() for stream in streams] == [alone] * 6
        await probe.aclose()
        assert set(replicas.processes()) <= {"r0", "r1"}
    assert replicas.processes() == {}


@pytest.mark.requirement("R22", "R43")
@pytest.mark.parametrize("way", ["abort", "pause"])
@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"seed": 3}])
async def test_abort_missed_by_a_dying_replica_still_ends_its_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str, sampling: dict[str, Any]
) -> None:
    """They end with the tokens told, are counted, and do not go on elsewhere."""
    trap = replicas.Trap(monkeypatch)
    async with replicas.pool(tmp_path) as pool:
        calls = [
            pool.generate(GenerateRequest(f"c{n}", PROMPT, Sampling(max_tokens=3000, **sampling), session_id=f"s{n}"))
            for n in range(2)
        ]
        for call in calls:
            await anext(call)
        assert all(replica.load_tokens for replica in pool.stats().replicas)
        trap.set("before", "r0", way)
        if way == "abort":
            assert await pool.abort(everything=True) == 2
        else:
            await pool.pause(PauseMode.ABORT)
        for call in calls:
            done = [event async for event in call][-1]
            assert isinstance(done, Done) and done.finish_reason is FinishReason.ABORT


@pytest.mark.requirement("R22", "R43")
async def test_a_score_under_which_replicas_die_again_and_again_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be what kills them, and there are others to serve."""
    trap = replicas.Trap(monkeypatch)
    async with replicas.pool(tmp_path, count=4) as pool:
        for n in range(4):
            trap.set("before", f"r{n}", "score")
        with pytest.raises(Unavailable) as caught:
            await pool.score(PROMPT)
        assert caught.value.reason == "ENGINE_DIED" and caught.value.retry_after_s
        assert sum(replica.restarts for replica in (await replicas.all_live(pool)).replicas) == MAX_DEATHS


@pytest.mark.requirement("R43", "R87")
async def test_a_replica_that_cannot_go_on_after_an_update_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would keep its calls for ever; they end elsewhere, and the update is in force."""
    trap = replicas.Trap(monkeypatch)
    async with replicas.pool(tmp_path) as pool:
        calls = [asyncio.create_task(complete(pool, f"c{n}", 400)) for n in range(4)]
        trap.refuse("r0", "resume")
        await replicas.push(pool, tmp_path, 1, seed=1)
        for call in calls:
            assert (await call).token_ids.size == 400
        assert (await replicas.all_live(pool)).replicas[0].restarts == 1
        assert await replicas.versions(pool) == {"r0": 1, "r1": 1}


@pytest.mark.requirement("R23", "R87")
async def test_an_update_for_which_a_replica_does_not_stand_still_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It fails by type, the old policy goes on everywhere, and the same push then succeeds."""
    trap = replicas.Trap(monkeypatch)
    async with replicas.pool(tmp_path) as pool:
        trap.refuse("r0", "pause")
        with pytest.raises(PenstockError) as caught:
            await replicas.push(pool, tmp_path, 1, seed=1)
        assert caught.value.reason == "GENERATION_FAILED"
        assert await replicas.versions(pool) == {"r0": 0, "r1": 0}
        assert (await complete(pool, "old")).version_spans[0].policy_version == 0
        await replicas.push(pool, tmp_path, 1, seed=1)
        assert await replicas.versions(pool) == {"r0": 1, "r1": 1}
        assert not any(replica.restarts for replica in pool.stats().replicas)
