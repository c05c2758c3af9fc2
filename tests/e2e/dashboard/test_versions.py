"""The dashboard's page of a task by policy version, in a real browser, on real rollouts of two versions."""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass, replace

import numpy as np
import pytest
import pytest_asyncio
from playwright.async_api import Browser, Page, expect
from tests.e2e import rollout_cases as cases
from tests.support.policy import bash
from tests.support.services.stack import OBSERVER_TOKEN, Running
from tests.support.terminal.browser import looking

from penstock.client import Call, RolloutResult

BEFORE = ([bash(cases.LOOK), "It looks right to me."],)
"""A policy that repairs nothing."""
AFTER = ([bash(cases.LOOK), bash(f"{cases.MEAN}\n{cases.MEDIAN}"), "Repaired: `mean` and `median`."],)
"""What it has learned."""
DIFFERENCE = "right \N{MINUS SIGN} left"


@dataclass(frozen=True)
class Learned:
    """Two groups of one task and run, of policy versions 2 and 5: of each, two rollouts that say the same."""

    run_id: str
    task_id: str
    before: list[RolloutResult]
    after: list[RolloutResult]

    @property
    def place(self) -> str:
        """The first rollout of the old version beside the second of the new one: their logprobs differ."""
        sides = f"left={self.before[0].rollout_id}&right={self.after[1].rollout_id}"
        return f"/tasks/{self.task_id}/versions?run={self.run_id}&{sides}"


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def learned(stack: Running) -> Learned:
    """A run whose policy learned the task between two groups."""
    run_id = f"run-{secrets.token_hex(4)}"
    task = replace(cases.stats_task(), task_id=f"versions-{secrets.token_hex(4)}")
    groups: list[list[RolloutResult]] = []
    for version, turns in ((2, BEFORE), (5, AFTER)):
        async with cases.answering(stack.ps, cases.by_index(turns), run_id, version=version):
            group = await stack.ps.groups.create(task, "shell", 2, run_id=run_id)
            groups.append(await group.results(samples_only=False))
    return Learned(run_id, task.task_id, *groups)


def _calls(result: RolloutResult) -> list[Call]:
    assert result.trajectory is not None
    return list(result.trajectory.calls)


def _tokens(call: Call) -> tuple[np.ndarray, np.ndarray]:
    assert call.completion is not None
    assert call.completion.token_ids is not None and call.completion.logprobs is not None
    return np.asarray(call.completion.token_ids), np.asarray(call.completion.logprobs)


async def _difference(page: Page) -> float:
    """What the description of the current token says of right minus left, in nats."""
    said = await page.locator(".inspector-fact", has_text=DIFFERENCE).inner_text()
    found = re.search(r"([+-]?[0-9.e-]+) nats$", said)
    assert found is not None, said
    return float(found[1])


@pytest.mark.requirement("R87", "R130")
async def test_a_runs_page_leads_to_a_task_by_version_and_to_the_first_token_that_changed(
    browser: Browser, address: str, learned: Learned
) -> None:
    """Two versions stand side by side; tokens of both have their difference in logprob, the others are marked."""
    async with looking(browser, address, OBSERVER_TOKEN, f"/runs/{learned.run_id}") as page:
        await page.get_by_role("link", name=f"Compare 2 versions of {learned.task_id}").click()
        versions = page.get_by_role("table", name="Policy versions").get_by_role("row")
        await expect(versions).to_have_count(3)
        await expect(versions.nth(1)).to_contain_text(re.compile("^2.*0 %.*0.333"))
        await expect(versions.nth(2)).to_contain_text(re.compile("^5.*100 %"))
        # What is shown is in the address: the oldest version on the left, the newest on the right.
        await expect(page).to_have_url(re.compile(r"[?]run=run-[0-9a-f]+&left=.+&right=.+"))
        await page.get_by_label("Rollout on the left").select_option(learned.before[0].rollout_id)
        await page.get_by_label("Rollout on the right").select_option(learned.after[1].rollout_id)

        old, new = _calls(learned.before[0]), _calls(learned.after[1])
        changed = int(np.argmax(_tokens(old[1])[0] != _tokens(new[1])[0][: old[1].sampled_count]))
        comparison = page.get_by_role("region", name="Rollouts of two policy versions side by side")
        await expect(comparison).to_contain_text(f"They part at call 1, token {changed} of what the model sampled.")
        await expect(comparison.locator(".side")).to_have_text([re.compile("version 2"), re.compile("versions 5.6")])
        first, second, third = (comparison.locator(f".pair[data-turn='{turn}']") for turn in range(3))
        # Before it all is the same, by other probabilities.
        count = old[0].sampled_count
        mean = float(np.mean(_tokens(new[0])[1] - _tokens(old[0])[1]))
        for half in range(2):
            figures = first.locator(".change-figures").nth(half)
            await expect(figures).to_contain_text(f"{count} of {count} tokens in both")
            said = re.search(rf"{DIFFERENCE} ([+-]?[0-9.e-]+) nats a token over ([0-9]+)", await figures.inner_text())
            assert said is not None and int(said[2]) == count
            assert float(said[1]) == pytest.approx(mean, rel=1e-3)
        await expect(first.locator(".changed")).to_have_count(0)
        await first.locator(".tokens").first.focus()
        await page.keyboard.press("ArrowRight")
        await expect(page.locator(".inspector")).to_contain_text("logprob on the right")
        assert await _difference(page) == pytest.approx(_tokens(new[0])[1][0] - _tokens(old[0])[1][0], rel=1e-3)
        # From it on, what only one of them sampled is marked.
        await page.get_by_role("button", name="Go there").click()
        await expect(second).to_be_in_viewport()
        for half in range(2):
            await expect(second.locator(".half").nth(half).locator(".changed").first).to_be_visible()
        await second.locator(".half").first.locator(".changed").first.hover()
        await expect(page.locator(".inspector")).to_contain_text("on the right not sampled")
        await expect(third).to_contain_text("no such call")
        await third.scroll_into_view_if_needed()
        await expect(third.locator(".changed").first).to_be_visible()
        await expect(third.locator(".same")).to_have_count(0)


@pytest.mark.requirement("R87", "R130")
async def test_a_rollout_is_put_beside_another_version_or_beside_its_own(
    browser: Browser, address: str, learned: Learned
) -> None:
    """The rollout's page keeps it on the left; two of one version say what differs by chance alone."""
    rollout_id = learned.before[1].rollout_id
    async with looking(browser, address, OBSERVER_TOKEN, f"/rollouts/{rollout_id}") as page:
        await page.get_by_role("link", name="Compare versions").click()
        await expect(page).to_have_url(re.compile(f"left={rollout_id}&right="))
        await expect(page.get_by_role("button", name="Put version 5 on the right")).to_have_attribute(
            "aria-pressed", "true"
        )
        await page.get_by_role("button", name="Put version 2 on the right").click()
        comparison = page.get_by_role("region", name="Rollouts of two policy versions side by side")
        await expect(comparison).to_contain_text("Token by token they are equal")
        await comparison.locator(".tokens").first.focus()
        await page.keyboard.press("ArrowRight")
        await expect(page.locator(".inspector")).to_contain_text("logprob on the right")
        # Colours say what changed, or what they say of a rollout alone.
        await expect(comparison.locator(".same").first).to_be_visible()
        await comparison.get_by_text("Policy version", exact=True).click()
        await expect(comparison.locator(".same")).to_have_count(0)
        await page.get_by_role("link", name="The task", exact=True).click()
        await page.get_by_role("link", name="By policy version").click()
        await expect(page.get_by_role("table", name="Policy versions").get_by_role("row")).to_have_count(3)


@pytest.mark.requirement("R87")
async def test_versions_fit_a_phone_and_a_rollout_that_is_gone_is_named(
    browser: Browser, address: str, learned: Learned
) -> None:
    """In the dark, on 390 pixels, nothing is wider than the page, and each half says whose it is."""
    async with looking(browser, address, OBSERVER_TOKEN, learned.place, width=390, height=800, scheme="dark") as page:
        await expect(page.locator(".pair-parting")).to_be_visible()
        await expect(page.locator("p.half-name").first).to_contain_text("version 2")
        assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        gone = learned.place.replace(learned.before[0].rollout_id, "gone")
        await page.goto(f"{address}#{gone}")
        await expect(page.get_by_role("status")).to_contain_text("Not among the rollouts shown here: gone.")
        await expect(page.locator(".pair-parting")).to_be_visible()
