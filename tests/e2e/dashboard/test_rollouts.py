"""The dashboard's pages of a rollout and of a group, in a real browser, on real rollouts."""

from __future__ import annotations

import asyncio
import re
import secrets

import numpy as np
import pytest
import pytest_asyncio
from playwright.async_api import Browser, expect
from tests.e2e import rollout_cases as cases
from tests.support.copying import copy_task, finish
from tests.support.policy import bash, sampled
from tests.support.services.stack import OBSERVER_TOKEN, Running
from tests.support.terminal.browser import looking

from penstock.client import (
    AgentChoice,
    Budgets,
    Command,
    Completion,
    Inference,
    Message,
    Mode,
    ModelCall,
    Role,
    RolloutResult,
    Task,
    Text,
)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def group(stack: Running) -> list[RolloutResult]:
    """Four siblings: three repaired more or less, the last did nothing until its budget was used up."""
    run_id = f"run-{secrets.token_hex(4)}"
    async with cases.answering(stack.ps, cases.by_index(cases.STATS_TURNS), run_id):
        made = await stack.ps.groups.create(
            cases.stats_task(), "shell", 4, run_id=run_id, budgets=Budgets(max_calls=4), group_id=f"g-{run_id}"
        )
        return await made.results(samples_only=False)


@pytest.mark.requirement("R74", "R79", "R82", "R87")
async def test_rollout_page_shows_reward_diff_and_sampled_tokens(
    browser: Browser, address: str, group: list[RolloutResult]
) -> None:
    """What the page says of reward, exits, files and tokens is what the record says."""
    best = group[0]
    assert best.trajectory and best.reward and best.reward.value == 1.0
    async with looking(browser, address, OBSERVER_TOKEN, f"/rollouts/{best.rollout_id}") as page:
        await expect(page.get_by_role("heading", name=best.rollout_id)).to_be_visible()
        await expect(page.get_by_role("button", name=f"Copy the id {best.rollout_id}")).to_be_visible()
        await expect(page.get_by_text("3 of 3 verifier commands passed")).to_be_visible()
        verifier = page.get_by_role("region", name="Verifier")
        await expect(verifier.get_by_text("exit 0")).to_have_count(3)
        await expect(page.locator("article.turn")).to_have_count(4)

        # By keyboard: the first sampled token, then the next.
        call = best.trajectory.calls[-1]
        assert call.completion and call.completion.token_ids is not None and call.completion.logprobs is not None
        tokens = page.locator(f"#call-{call.call_id} .tokens").first
        await tokens.scroll_into_view_if_needed()
        await tokens.focus()
        inspector = page.locator(".inspector")
        for index in range(2):
            await page.keyboard.press("ArrowRight")
            await expect(inspector).to_contain_text(f"token {index} of {call.sampled_count}")
            await expect(inspector).to_contain_text(f"id {call.completion.token_ids[index]}")
            await expect(inspector).to_contain_text(f"policy version {call.completion.policy_version}")
            await expect(inspector).to_contain_text("training trained")
        # By pointer.
        await tokens.locator("span").first.hover()
        await expect(inspector).to_contain_text("token 0 of")

        await page.get_by_role("tab", name="Files").click()
        await expect(page.locator(".diff-row.diff-removed").first).to_contain_text(
            "return sum(values) / (len(values) - 1)"
        )
        await expect(page.locator(".diff-row.diff-added").first).to_contain_text("return sum(values) / len(values)")
        await page.get_by_role("tab", name="Events").click()
        await expect(page.locator(".event").last).to_contain_text("completed")
        # By the same key as in the list.
        await page.keyboard.press("g")
        await expect(page).to_have_url(re.compile(f"#/groups/{best.rollout.group_id}"))


@pytest.mark.requirement("R82")
async def test_a_real_agents_rollout_is_shown_with_its_side_call_apart(
    stack: Running, browser: Browser, address: str
) -> None:
    """OpenCode, unmodified: its two turns, the title that it asks for beside them, its own events, its reward."""
    agent = AgentChoice(name="opencode", skip_permissions=True)
    rollout = await stack.ps.rollouts.create(copy_task(stack), agent, mode=Mode.TRANSPARENT_PROXY, source=Inference())
    finished = await finish(rollout)
    assert finished.reward == 1.0, finished.agent_said()
    calls = (await rollout.trajectory()).calls
    async with looking(browser, address, OBSERVER_TOKEN, f"/rollouts/{rollout.rollout_id}") as page:
        await expect(page.locator("article.turn")).to_have_count(len(calls))
        side = next(call for call in calls if call.call_class == "title")
        await expect(page.locator(f"#call-{side.call_id}")).to_contain_text("title")
        main = [call for call in calls if call.call_class == "main"]
        await expect(page.locator(f"#call-{main[0].call_id}")).to_contain_text("bash work.sh")
        await expect(page.get_by_role("region", name="Reward")).to_contain_text("1")
        await page.get_by_role("tab", name="Events").click()
        await expect(page.locator(".event").last).to_contain_text("completed")


@pytest.mark.requirement("R74", "R88")
async def test_siblings_are_compared_at_their_first_difference(
    browser: Browser, address: str, group: list[RolloutResult]
) -> None:
    """Rewards, ends, calls and the same turn of each beside the other, from a rollout to its siblings."""
    rewards = [result.reward.value if result.reward else None for result in group]
    assert rewards[0] == 1.0 and rewards[3] is not None and rewards[3] < 0.5
    async with looking(browser, address, OBSERVER_TOKEN, f"/rollouts/{group[1].rollout_id}") as page:
        await page.get_by_role("link", name="2 of 4: compare").click()
        await expect(page.locator(".siblings-table tbody tr")).to_have_count(4)
        # The overview's styles, which the page has by now or later, are not for this page's plot.
        plot = await page.get_by_role("img", name="Rewards of 4 siblings").bounding_box()
        assert plot and plot["width"] > 400 and plot["height"] > 40
        await expect(page.locator(".siblings-table")).to_contain_text("BUDGET_EXHAUSTED")
        # It came from the second, which stays on the left; the other side is the best.
        await expect(page.get_by_role("button", name="Put rollout 1 on the left")).to_have_attribute(
            "aria-pressed", "true"
        )
        await expect(page.get_by_role("button", name="Put rollout 0 on the right")).to_have_attribute(
            "aria-pressed", "true"
        )
        await expect(page.locator(".comparison")).to_contain_text(re.compile("They part at call 1, token [0-9]+"))
        # The call before is marked in both columns, which so stay level.
        await expect(page.get_by_text("the same in both")).to_have_count(2)
        await expect(page.locator(".half-name").first).to_be_hidden()
        await page.get_by_role("button", name="Go there").click()
        await expect(page.locator(".pair-parting")).to_be_in_viewport()
    async with looking(browser, address, OBSERVER_TOKEN, f"/groups/{group[0].rollout.group_id}", width=390) as page:
        await expect(page.get_by_role("button", name="Put rollout 0 on the left")).to_have_attribute(
            "aria-pressed", "true"
        )
        assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        # One below the other, each half says whose it is.
        await expect(page.locator(".half-name").nth(0)).to_have_text("Rollout 0")
        await expect(page.locator(".half-name").nth(0)).to_be_visible()
        await expect(page.locator(".half-name").nth(1)).not_to_have_text("Rollout 0")


@pytest.mark.requirement("R26", "R70")
async def test_running_rollout_is_followed_and_cancelled_by_an_authorised_token(
    stack: Running, browser: Browser, address: str
) -> None:
    """Calls appear as they end, without a reload; a cancelled rollout says whose doing it was."""
    run_id = f"run-{secrets.token_hex(4)}"
    held = asyncio.Event()

    def script(call: ModelCall) -> str:
        held.set()
        return bash("echo one") if call.index == 0 else bash("sleep 600")

    token = stack.stack.trainer_token
    async with cases.answering(stack.ps, script, run_id):
        rollout = await stack.ps.rollouts.create(cases.stats_task(), "shell", run_id=run_id)
        async with looking(browser, address, token, f"/rollouts/{rollout.rollout_id}", scheme="dark") as page:
            await held.wait()
            await expect(page.locator("article.turn")).to_have_count(2)
            await expect(page.locator(".rollout-title")).to_contain_text("running")
            await expect(page.get_by_role("region", name="Capture")).to_contain_text("not yet")
            await expect(page.get_by_role("region", name="Capture")).not_to_contain_text("NOTHING_TO_TRAIN")
            await page.keyboard.press("?")
            await expect(page.get_by_role("dialog", name="Keys")).to_contain_text("cancel the rollout")
            await page.keyboard.press("Escape")
            # The key that cancels is that of the list, and like there it asks first.
            await page.keyboard.press("c")
            await page.get_by_role("button", name="Cancel the rollout").click()
            await expect(page.locator(".failure")).to_contain_text("It was cancelled")
            await expect(page.locator(".failure")).to_contain_text("Caused by a person's decision")
    assert (await rollout.result()).failure is not None


@pytest.mark.requirement("R71")
async def test_run_of_a_group_has_its_sampled_entropy_and_why_one_failed(
    browser: Browser, address: str, group: list[RolloutResult]
) -> None:
    """Both come from the gate's and the driver's own records: no trainer logged anything."""
    calls = [call for one in group if one.trajectory for call in one.trajectory.calls if call.completion]
    logprobs = [call.completion.logprobs for call in calls if call.completion and call.completion.logprobs is not None]
    assert len(logprobs) == len(calls) > 4
    of_calls = [-float(values.mean()) for values in logprobs]
    run_id = group[0].rollout_id.removeprefix("g-").removesuffix("-0")
    async with looking(browser, address, OBSERVER_TOKEN, f"/runs/{run_id}") as page:
        entropy = page.get_by_role("region", name="Sampled entropy of a token by group")
        said = await entropy.get_by_role("img").get_attribute("aria-label")
        found = re.search(r" from ([0-9.]+) to ", said or "")
        # The driver counts calls as they end: the last ones may not be in it.
        assert found and min(of_calls) - 1e-3 <= float(found[1]) <= max(of_calls) + 1e-3, (said, of_calls)
        failed = page.get_by_role("region", name="Failed by group")
        await failed.get_by_role("img").focus()
        await page.keyboard.press("ArrowRight")
        await expect(failed).to_contain_text("here: 1 BUDGET_EXHAUSTED")


@pytest.mark.requirement("R5", "R57", "R58", "R62")
async def test_failed_setup_and_absent_rollout_or_group_are_explained(
    stack: Running, browser: Browser, address: str
) -> None:
    """The reason, the command's output, and no reward that could be taken for zero."""
    task = Task(
        task_id="bad-setup", instruction="Do it.", setup=[Command(shell="echo building; echo no-such-tool >&2; exit 3")]
    )
    rollout = await stack.ps.rollouts.create(task, "shell")
    await rollout.result()
    async with looking(browser, address, OBSERVER_TOKEN, f"/rollouts/{rollout.rollout_id}") as page:
        await expect(page.locator(".failure")).to_contain_text("SETUP_FAILED")
        await expect(page.locator(".failure")).to_contain_text("Caused by the task's setup")
        await expect(page.locator(".facts")).to_contain_text("Driver")
        setup = page.get_by_role("region", name="Setup")
        await expect(setup).to_contain_text("exit 3")
        await expect(setup).to_contain_text("no-such-tool")
        await expect(page.get_by_text("Not graded, which is not zero")).to_be_visible()
        await expect(page.get_by_role("region", name="Capture")).to_contain_text("no capture of this rollout")
    async with looking(browser, address, OBSERVER_TOKEN, "/rollouts/no-such-rollout") as page:
        await expect(page.get_by_role("alert")).to_contain_text("There is no rollout no-such-rollout")
    async with looking(browser, address, OBSERVER_TOKEN, "/groups/no-such-group") as page:
        await expect(page.get_by_role("alert")).to_contain_text("There is no group no-such-group")


@pytest.mark.requirement("R8", "R13")
async def test_agents_text_cannot_run_hide_or_stop_the_page(stack: Running, browser: Browser, address: str) -> None:
    """Markup, terminal escapes, bidi marks and a line of 10 MB are text; `looking` fails a script, a dialog, a
    request to elsewhere and a violated policy."""
    run_id = f"run-{secrets.token_hex(4)}"

    async def answer(call: ModelCall) -> None:
        if call.index == 0:
            ids, logprobs = sampled(bash(cases.HOSTILE_WORK))
            await call.deliver(Completion.of_tokens(np.array(ids), np.array(logprobs), policy_version=1))
        else:
            said = f"{cases.HOSTILE_WORDS}\n{cases.HOSTILE_LINE}"
            await call.deliver(Completion(message=Message(Role.ASSISTANT, (Text(said),))))

    async def serve() -> None:
        async with stack.ps.intercept(run_id=run_id) as session:
            async for call in session.calls():
                await answer(call)

    serving = asyncio.create_task(serve())
    task = Task(task_id="hostile", instruction=cases.HOSTILE_WORDS.replace("\x00", ""), keep_diff=True)
    rollout = await stack.ps.rollouts.create(task, "shell", run_id=run_id)
    await rollout.result()
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)

    async with looking(browser, address, OBSERVER_TOKEN, f"/rollouts/{rollout.rollout_id}") as page:
        await expect(page.locator("article.turn")).to_have_count(2)
        last = page.locator("article.turn").last
        await last.scroll_into_view_if_needed()
        await expect(last.locator(".said-model")).to_contain_text("10 MB not shown")
        await expect(last.locator(".said-model")).to_contain_text("<script>alert(1)</script>")
        await expect(last.locator(".mark", has_text="U+202E").first).to_be_visible()
        await expect(page.locator(".ansi-red").first).to_have_text("red")
        await last.locator(".said-model").get_by_role("button", name="Show more").click()
        for tab in ("Events", "Files"):
            await page.get_by_role("tab", name=tab).click()
            for summary in await page.locator(".tabpanel summary").all():
                if await summary.is_visible():
                    await summary.click()
        await expect(page.locator(".diff-file").first).to_contain_text("<img src=x onerror=alert(5)>.html")
        assert await page.locator("main script, main img, main a[href^=javascript], main iframe").count() == 0
        assert await page.locator("*").count() < 5_000
