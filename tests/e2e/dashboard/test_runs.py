"""The dashboard's runs, tasks and agents in a real browser, over rollouts of a trainer that has learned."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from playwright.async_api import Browser, expect
from tests.support.services.trained_rows import GROUP, TASKS, trained
from tests.support.terminal.browser import looking

STEPS = 4
RUNS = {"learns": 0.8, "slower": 0.3, "stands-still": 0.0}
PER_RUN = STEPS * len(TASKS) * GROUP


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def learned(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[str]:
    """The address of a dashboard with three runs."""
    async with trained(tmp_path_factory.mktemp("rows"), RUNS, STEPS) as (_, at):
        yield at


async def test_runs_are_listed_and_two_are_compared_in_one_picture(browser: Browser, learned: str) -> None:
    """A run is a row with its mean and interval; picked ones share pictures and are compared task by task."""
    async with looking(browser, learned, "any", "/runs") as page:
        row = page.get_by_role("table", name="Runs").get_by_role("row")
        await expect(row).to_have_count(1 + len(RUNS))
        of_one = row.filter(has_text="learns")
        await expect(of_one).to_contain_text(str(PER_RUN))
        await expect(of_one).to_contain_text(re.compile(r"0\.\d+ 0\.\d+ to 0\.\d+"))
        # The head of a column sorts, and the address has the order.
        await page.get_by_role("button", name="Mean reward").click()
        await expect(row.nth(1)).to_contain_text("learns")
        await expect(page).to_have_url(re.compile("sort=-reward"))
        await page.get_by_label("Compare learns").check()
        await page.get_by_label("Compare stands-still").check()
        await page.get_by_role("button", name="Compare 2 runs").click()

        await expect(page).to_have_url(re.compile("#/runs/learns[?]with=stands-still"))
        picture = page.get_by_role(
            "img", name=re.compile("^Reward by step, 0 to 3: learns from .*; stands-still from ")
        )
        await expect(picture).to_be_visible()
        await expect(picture.locator("path.band")).to_have_count(2)
        # Both have the same tasks: beside the difference of independent runs is that over their tasks, with its test.
        second = page.get_by_role("table", name="Runs").get_by_role("row").filter(has_text="stands-still")
        await expect(second).to_contain_text(re.compile(r"-0\.\d+ -0\.\d+ to [+-]?0?\.?\d+, p = 0\.\d+"))
        tasks = page.get_by_role("table", name="Tasks of both runs")
        await expect(tasks.get_by_role("row")).to_have_count(1 + len(TASKS))
        # A task's author wrote it: `looking` fails on the dialog that it asks for.
        await expect(tasks).to_contain_text("<img src=x onerror=alert(1)>")
        await page.get_by_role("button", name="Take learns out of the picture").click()
        await expect(page.get_by_role("heading", level=1)).to_have_text("Run stands-still")


async def test_run_is_read_by_step_and_leads_to_the_rollouts_of_a_step(browser: Browser, learned: str) -> None:
    """By keyboard too: a point has its value and interval, and opens what it is made of."""
    async with looking(browser, learned, "any", "/runs/learns") as page:
        picture = page.get_by_role("img", name=re.compile("^Reward by step"))
        await picture.focus()
        await page.keyboard.press("ArrowRight")
        section = page.get_by_role("region", name="Reward by step")
        await expect(section).to_contain_text(re.compile(r"step 0: 0[.0-9]* \(0[.0-9]* to 0[.0-9]*\), n = \d+"))
        await page.get_by_label("Points by").select_option("version")
        await expect(page.get_by_role("img", name=re.compile("^Reward by policy version"))).to_be_visible()
        # What trainers reported to the engine is drawn beside it.
        await expect(
            page.get_by_role("img", name=re.compile("^Logprob gap by policy version, 0 to 3: "))
        ).to_be_visible()
        await page.get_by_label("Points by").select_option("step")
        await page.keyboard.press("Enter")
        await expect(page.get_by_label("Filter the rollouts")).to_have_value("run:learns label:step=0")
        table = page.get_by_role("table", name="Rollouts")
        await expect(table).to_have_attribute("aria-rowcount", str(1 + len(TASKS) * GROUP))
        # Names instead of random ids, and the heads sort.
        await expect(page.locator(".rollouts .line .name").first).to_have_text(re.compile("^[0-9a-f]{4} #0$"))
        await page.get_by_role("button", name="Rollout", exact=True).click()
        await expect(table.get_by_role("columnheader", name="Rollout")).to_have_attribute("aria-sort", "ascending")


async def test_failures_have_reasons_and_the_policy_an_entropy_by_step(browser: Browser, learned: str) -> None:
    """Why rollouts failed is a line for each frequent reason, and in words at each point; of several runs in words."""
    async with looking(browser, learned, "any", "/runs/slower") as page:
        reasons = page.get_by_role("region", name="Failures by reason, by step")
        await expect(reasons.get_by_role("list", name="Reasons").get_by_role("listitem")).to_have_count(3)
        await expect(reasons.get_by_role("img", name=re.compile("AGENT_TIMED_OUT from "))).to_be_visible()
        entropy = page.get_by_role("img", name=re.compile("^Sampled entropy of a token by step, 0 to 3: slower from 1"))
        await expect(entropy.locator("path.band")).to_have_count(1)
        failed = page.get_by_role("region", name="Failed by step")
        await failed.get_by_role("img").focus()
        said = []
        for step in range(STEPS):
            await page.keyboard.press("ArrowRight")
            await expect(failed).to_contain_text(f"step {step}: ")
            said.append(await failed.locator("header").inner_text())
        assert any(re.search(r"here: \d+ [A-Z]+_", text) for text in said), said
        await page.goto(f"{learned}#/runs/slower?with=learns")
        await expect(page.get_by_role("img", name=re.compile("^Sampled entropy.*; learns from "))).to_be_visible()
        await expect(reasons).to_have_count(0)


async def test_first_page_draws_the_newest_runs_as_their_own_pages_do(browser: Browser, learned: str) -> None:
    """A line by step for each, with the interval of its mean; smoothing is kept in the address."""
    async with looking(browser, learned, "any", "/") as page:
        picture = page.get_by_role("img", name=re.compile("^Reward by step, 0 to 3: "))
        await expect(picture.locator("path.band")).to_have_count(len(RUNS))
        section = page.get_by_role("region", name="Reward by step")
        await expect(section).to_contain_text("95 % interval of the mean, over tasks (Wilson)")
        await section.get_by_label("Points pooled").select_option("3")
        await expect(page).to_have_url(re.compile("smooth=3"))
        await page.get_by_label("Filter the rollouts").fill("run:slower")
        await expect(picture.locator("path.band")).to_have_count(1)
        await picture.focus()
        await page.keyboard.press("ArrowRight")
        await page.keyboard.press("Enter")
        await expect(page.get_by_label("Filter the rollouts")).to_have_value("run:slower label:step=0")
        await page.go_back()
        await section.get_by_role("link", name="slower").click()
        await expect(page.get_by_role("heading", level=1)).to_have_text("Run slower")


async def test_what_the_trainer_logged_is_drawn_by_step_of_one_run_or_of_several(
    browser: Browser, learned: str
) -> None:
    """Each metric has a picture with its values in words; the address keeps the filter."""
    async with looking(browser, learned, "any", "/runs/learns") as page:
        await expect(page.get_by_role("heading", name="Logged by the trainer")).to_be_visible()
        section = page.get_by_role("region", name="optimizer/grad_norm")
        picture = section.get_by_role("img", name=re.compile("^optimizer.grad_norm, 0 to 3: learns from "))
        await picture.focus()
        for _ in range(3):
            await page.keyboard.press("ArrowRight")
        await expect(section).to_contain_text("step 2: 25")
        # Smoothed, the spike is not in the mean; it is in the band.
        await page.get_by_label("Points pooled").select_option("3")
        await expect(picture.locator("path.band")).to_have_count(1)
        await expect(page.get_by_role("region", name="learning_rate")).to_contain_text("1e-6")
        await page.get_by_label("Run to add to the picture").fill("slower")
        await page.get_by_role("button", name="Add", exact=True).click()
        both = page.get_by_role("img", name=re.compile("^entropy, 0 to 3: learns from .*; slower from "))
        await expect(both).to_be_visible()
        await page.get_by_label("Filter the metrics").fill("NORM")
        await expect(both).to_have_count(0)
        await expect(page.get_by_role("img", name=re.compile("^optimizer.grad_norm"))).to_be_visible()
        await expect(page).to_have_url(re.compile("metric=NORM"))
        await page.get_by_label("Filter the metrics").fill("nothing")
        await expect(page.get_by_text("No metric has such a name.")).to_be_visible()


async def test_tasks_show_what_is_never_solved_and_a_view_is_kept(browser: Browser, learned: str) -> None:
    """A task that is always 0 is found; what is shown is saved as a view, which outlives the page."""
    async with looking(browser, learned, "any", "/tasks?q=run:learns") as page:
        rows = page.get_by_role("table", name="Tasks").get_by_role("row")
        await expect(rows).to_have_count(1 + len(TASKS))
        await page.get_by_role("button", name="Always 0").click()
        await expect(rows).to_have_count(2)
        await page.keyboard.press("v")
        await page.get_by_label("Name").fill("hopeless")
        await page.get_by_role("button", name="Save this view").click()
        await expect(page.get_by_role("button", name="View: hopeless")).to_be_visible()
        await rows.get_by_role("link", name="never-solved", exact=True).click()
        await expect(page.get_by_role("heading", level=1)).to_have_text("Task never-solved")
        agents = page.get_by_role("table", name="Agents")
        await expect(agents.get_by_role("row").filter(has_text="codex")).to_contain_text("0 %")
        await agents.get_by_role("link", name="codex").click()
        await expect(page.get_by_role("heading", level=1)).to_have_text("Agent codex")

        await page.reload()
        await page.get_by_role("button", name="Views").click()
        await page.get_by_role("link", name="hopeless").click()
        await expect(page).to_have_url(re.compile("#/tasks[?]q=run%3Alearns&rewards=always"))
        await expect(rows).to_have_count(2)


async def test_runs_and_tasks_fit_a_phone(browser: Browser, learned: str) -> None:
    """In the dark, on 360 pixels, nothing is wider than the page."""
    async with looking(browser, learned, "any", "/runs", width=360, height=720, scheme="dark") as page:
        for route, heading in (
            ("/runs", "Runs"),
            ("/runs/learns", "Run learns"),
            ("/runs/learns?with=slower", "2 runs"),
            ("/tasks/never-solved", "Task never-solved"),
            ("/agents", "Agents"),
        ):
            await page.goto(f"{learned}#{route}")
            await expect(page.get_by_role("heading", level=1)).to_have_text(heading)
            await expect(page.locator("tbody tr").first).to_be_visible()
            assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth"), route
