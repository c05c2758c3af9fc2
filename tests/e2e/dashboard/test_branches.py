"""Branches on the dashboard: asked for by a person in a real browser, and shown where their replay parts."""

from __future__ import annotations

import asyncio
import json
import os
import re
import secrets
from pathlib import Path

import pytest
from playwright.async_api import Browser, expect
from tests.e2e import rollout_cases as cases
from tests.support.copying import copy_task, training
from tests.support.policy import Reply, bash, in_shell, in_turn
from tests.support.services.stack import OBSERVER_TOKEN, Running
from tests.support.terminal.browser import looking
from tests.support.terminal.commands import invoke

from penstock.client import Replay
from penstock.client.transport.endpoints import write_connection

TURNS = ([bash(cases.LOOK), bash(cases.LOOK), "It looks right to me."],)
"""An agent that repairs nothing."""
CHANCE: Reply = in_turn(in_shell("cat /proc/sys/kernel/random/uuid"), in_shell("bash work.sh"), "The word is copied.")
"""An agent whose first command prints another id in each sandbox."""


@pytest.mark.requirement("R74", "R129")
async def test_branches_with_a_tool_call_are_asked_for_and_graded(
    stack: Running, browser: Browser, address: str
) -> None:
    """Wrong arguments stay in the sheet and are named; right ones repair what the rollout did not."""
    run_id = f"run-{secrets.token_hex(4)}"
    repair = json.dumps({"command": f"{cases.MEAN}\n{cases.MEDIAN}"})
    async with cases.answering(stack.ps, cases.by_index(TURNS), run_id):
        parent = await stack.ps.rollouts.create(cases.stats_task(), "shell", run_id=run_id)
        before = await parent.result()
        assert before.reward is not None and before.reward.value < 0.5
        call = (await parent.trajectory()).calls[1]
        async with looking(browser, address, stack.stack.trainer_token, f"/rollouts/{parent.rollout_id}") as page:
            await page.locator(f"#call-{call.call_id}").get_by_role("button", name="continue from here").click()
            sheet = page.get_by_role("dialog", name="Continue from call 1")
            await sheet.get_by_label("Branches").fill("2")
            await sheet.get_by_label("Answer of the call").select_option("A tool call")
            # What the model called is there to be changed.
            await expect(sheet.get_by_label("Tool", exact=True)).to_have_value("bash")
            assert json.loads(await sheet.get_by_label("Arguments").input_value()) == {"command": cases.LOOK}

            await sheet.get_by_label("Tool", exact=True).fill("")
            await sheet.get_by_label("Arguments").fill("{'command': 'ls'}")
            await sheet.get_by_label("Seed").fill("none")
            await sheet.get_by_role("button", name="Start the branches").click()
            await expect(sheet.locator(".wrong")).to_have_text(
                [re.compile("^Tool: is required"), re.compile("^Arguments: not JSON"), re.compile("^Seed: expected")]
            )
            await expect(sheet.get_by_label("Tool", exact=True)).to_be_focused()

            await sheet.get_by_label("Tool", exact=True).fill("bash")
            await sheet.get_by_label("Arguments").fill(repair)
            await sheet.get_by_label("Seed").fill("100")
            await sheet.get_by_label("Let it go on if the agent asks something else").check()
            await expect(sheet.locator(".wrong")).to_have_count(0)
            await sheet.get_by_role("button", name="Start the branches").click()

            await expect(page).to_have_url(re.compile("#/groups/"))
            rewards = page.locator(".siblings-table tbody tr")
            await expect(rewards).to_have_count(2)
            await expect(page.get_by_role("img", name="Rewards of 2 siblings")).to_be_visible()
            for index in range(2):
                await expect(rewards.nth(index)).to_contain_text("completed")
                await expect(rewards.nth(index).get_by_text("1", exact=True).first).to_be_visible()
            group_id = page.url.rpartition("/")[2]
        group = await stack.ps.groups.attach(group_id)
        results = await group.results(samples_only=False)
    assert [one.reward and one.reward.value for one in results] == [1.0, 1.0]
    assert group.info.branched_from is not None and group.info.branched_from.call_id == call.call_id
    assert group.info.branched_from.seed == 100
    for one in results:
        assert one.trajectory is not None
        given = one.trajectory.calls[1]
        assert given.given and given.completion is not None and given.completion.message is not None
        (tool,) = given.completion.message.tool_calls
        assert (tool.name, json.loads(tool.arguments_json)) == ("bash", json.loads(repair))


@pytest.mark.requirement("R74")
@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_the_sheet_of_a_branch_fits_a_phone(stack: Running, browser: Browser, address: str, scheme: str) -> None:
    """All its fields are reached by scrolling the sheet alone; nothing is wider than the screen."""
    run_id = f"run-{secrets.token_hex(4)}"
    async with cases.answering(stack.ps, cases.by_index(TURNS), run_id):
        rollout = await stack.ps.rollouts.create(cases.stats_task(), "shell", run_id=run_id)
        await rollout.result()
    route, token = f"/rollouts/{rollout.rollout_id}", OBSERVER_TOKEN
    for width, height in ((1280, 900), (390, 700)):
        async with looking(browser, address, token, route, width=width, height=height, scheme=scheme) as page:
            await page.get_by_role("button", name="continue from here").first.click()
            sheet = page.get_by_role("dialog", name="Continue from call 0")
            await sheet.get_by_label("Answer of the call").select_option("A tool call")
            start = sheet.get_by_role("button", name="Start the branches")
            await start.scroll_into_view_if_needed()
            await expect(start).to_be_in_viewport()
            assert await sheet.evaluate("element => element.scrollWidth <= element.clientWidth")
            assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.requirement("R127", "R129")
async def test_where_a_replay_parts_is_shown_with_both_texts(
    stack: Running, browser: Browser, address: str, tmp_path: Path
) -> None:
    """By `penstock replay`, with the likely cause, and by the rollout's page: the call, the token, and what differs."""
    label = secrets.token_hex(8)
    async with training(stack, label, CHANCE):
        parent = await stack.ps.rollouts.create(copy_task(stack), "shell", labels={"test": label})
        await parent.result()
        group = await parent.branch(2, replay=Replay.UNTIL_DIVERGENCE)
        (branch,) = await group.results(samples_only=False)
    assert branch.trajectory is not None
    (finding,) = [one for one in branch.trajectory.findings if one.reason == "REPLAY_DIVERGED"]
    said = re.fullmatch(
        r"Call 1 differs from the recorded call \S+ from token \d+ of its prompt on: '(.+)' was recorded,"
        r" '(.+)' is new\.",
        finding.message,
    )
    assert said is not None and said[1] != said[2]

    write_connection(tmp_path / "connection.json", stack.stack.endpoints, pid=os.getpid())
    environment = {"PENSTOCK_CONNECTION": str(tmp_path / "connection.json"), "COLUMNS": "4000"}
    code, printed, err = await asyncio.to_thread(invoke, "replay", branch.rollout_id, "--all", environment=environment)
    assert code == 0, err
    end = printed[printed.index("capture: ") :]
    assert f"REPLAY_DIVERGED: {finding.message}" in end
    assert "It is probably a random id." in end, end

    async with looking(browser, address, OBSERVER_TOKEN, f"/rollouts/{branch.rollout_id}") as page:
        capture = page.get_by_role("region", name="Capture")
        await expect(capture).to_contain_text(finding.message)
    async with looking(browser, address, OBSERVER_TOKEN, f"/rollouts/{branch.rollout_id}", width=390) as page:
        await expect(page.get_by_role("region", name="Capture")).to_contain_text(finding.message)
        assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth")
