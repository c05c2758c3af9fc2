"""The demo trainer against four real services: small, but nothing left out."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from playwright.async_api import expect
from safetensors.numpy import load_file
from tests.support.terminal.browser import chromium, dashboard, looking

from penstock.local.stack import LocalStack
from penstock_demo import learner, rollouts, train
from penstock_demo.display import Display
from penstock_demo.tasks import build_codec

STEPS, PROMPTS, GROUP = 2, 2, 4
MEASURED = {"seconds", "elapsed"}


@pytest.mark.requirement("R82", "R87")
@pytest.mark.timeout(900)
def test_a_seed_repeats_its_run_and_every_token_is_the_engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs of one seed agree in every figure and every token; versions advance with each push."""
    monkeypatch.setattr(learner, "WARM_STEPS", 2 * learner.WARM_CHUNK)
    monkeypatch.setattr(train, "PROMPTS", PROMPTS)
    monkeypatch.setattr(rollouts, "GROUP_SIZE", GROUP)
    runs = [_run(tmp_path / "first")]
    shutil.copytree(tmp_path / "first" / "cache", tmp_path / "second" / "cache")
    runs.append(_run(tmp_path / "second"))
    metrics, rows = runs[0]
    assert [line["policy_version"] for line in metrics] == list(range(STEPS))
    assert all(line["rollouts"] == PROMPTS * GROUP for line in metrics)
    for name in ("first", "second"):
        ungraded = tmp_path / name / "seed" / "ungraded.jsonl"
        assert not ungraded.exists(), ungraded.read_text()
    assert all(0.0 <= line["logprob_gap"] < 1e-4 for line in metrics)
    assert len(rows) == STEPS * PROMPTS * GROUP
    for row in rows:
        assert len(row["input_ids"]) == len(row["loss_mask"]) == len(row["logprobs"])
        assert 0.0 <= row["reward"] <= 1.0
    assert sum(sum(row["loss_mask"]) for row in rows) == sum(line["tokens"] for line in metrics)
    assert runs[0] == runs[1]

    first, second = (tmp_path / name / "seed" for name in ("first", "second"))
    weights = [load_file(path / "model" / "model.safetensors") for path in (first, second)]
    assert all(np.array_equal(value, weights[1][name]) for name, value in weights[0].items())
    initial = load_file(first / "initial" / "model.safetensors")
    assert any(not np.array_equal(value, weights[0][name]) for name, value in initial.items())
    asyncio.run(_shown_again(first))


async def _shown_again(run: Path) -> None:
    """Services on what a run left: the dashboard has its groups, its rollouts and a page of each."""
    stack = LocalStack(model_dir=run / "model", state_dir=run / "services")
    async with (
        stack,
        dashboard(stack.endpoints) as address,
        chromium() as browser,
        looking(browser, address, stack.trainer_token, "/") as page,
    ):
        groups = page.get_by_role("region", name="Newest groups").get_by_role("link")
        await expect(groups).to_have_count(STEPS * PROMPTS)
        await expect(page.get_by_text(f"{STEPS * PROMPTS * GROUP} rollouts", exact=True)).to_be_visible()
        await page.locator("a[href^='#/rollouts/']").first.click()
        await expect(page.locator("article.turn").first).to_be_visible()


def _run(directory: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """A run of two steps: its metrics without the times, and its samples in the order of their rollouts."""
    run = directory / "seed"
    run.mkdir(parents=True)
    with Display("test") as display:
        codec = build_codec()
        policy = train.warm_start(codec, 5, run, display)
        asyncio.run(train.train(policy, codec, train.Course(5, STEPS), run, 0.0, display))
    metrics = _lines(run / "metrics.jsonl")
    rows = [row for path in (run / "trajectories").iterdir() for row in _lines(path)]
    kept = ("rollout_id", "input_ids", "loss_mask", "logprobs", "reward")
    return (
        [{key: value for key, value in line.items() if key not in MEASURED} for line in metrics],
        sorted(({key: row[key] for key in kept} for row in rows), key=lambda row: str(row["rollout_id"])),
    )


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
