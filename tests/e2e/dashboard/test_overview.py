"""The dashboard's overview, services and form in a real browser: on the real stack, and on a thousand rollouts."""

from __future__ import annotations

import re
import secrets
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from playwright.async_api import Browser, expect
from tests.support.services.many_rows import many
from tests.support.services.stack import OBSERVER_TOKEN, Running
from tests.support.terminal.browser import looking

from penstock.client import Task


@pytest.mark.requirement("R66", "R71", "R74")
async def test_form_starts_a_rollout_and_shows_its_reward(browser: Browser, address: str, stack: Running) -> None:
    """What the form says is what runs; its row goes on by itself, and its page has the rest."""
    run_id = f"run-{secrets.token_hex(4)}"
    async with looking(browser, address, stack.stack.trainer_token, "/new") as page:
        # The page asks for the agents until the driver answers.
        agent = page.get_by_label("Agent", exact=True)
        await expect(agent.locator("option", has_text="shell")).to_be_attached(timeout=120_000)
        await agent.select_option("shell")
        # What options there are is seen whole.
        options = page.get_by_label("Agent's options")
        await expect(options).to_have_attribute("placeholder", re.compile("command_timeout"))
        assert await options.evaluate("element => element.scrollHeight <= element.clientHeight")
        await page.get_by_label("Setup").fill("echo echo done > work.sh")
        await page.get_by_label("Verifier").fill("test -f work.sh\nfalse")
        await page.get_by_label("Run", exact=True).fill(run_id)
        await page.get_by_label("Task id").fill("from-the-form")
        await page.get_by_label("Instruction").fill("Run work.sh, then say what it printed.")
        await page.get_by_label("Labels").fill("-made=by-hand")
        await page.get_by_role("button", name="Start the rollout").click()

        # The driver's words, at the field that they are about; nothing else is lost.
        await expect(page.get_by_label("Labels")).to_have_attribute("aria-invalid", "true")
        await expect(page.locator("#field-labels-note")).not_to_be_empty()
        await expect(page.get_by_role("alert")).to_contain_text("Labels: ")
        await expect(page.get_by_role("alert")).not_to_contain_text("spec.")
        await page.get_by_label("Labels").fill("made=by-hand")
        await page.get_by_role("button", name="Start the rollout").click()
        await expect(page).to_have_url(re.compile("#/rollouts/"))

        await page.goto(f"{address}#/?q=run:{run_id}")
        line = page.locator(".rollouts .line")
        await expect(line).to_have_count(1)
        await expect(line.locator(".task")).to_have_text("from-the-form")
        await expect(line.locator(".reward")).to_have_text("0.5", timeout=120_000)
        await expect(line.locator(".state")).to_have_text("completed")
        await line.click()
        await expect(page).to_have_url(re.compile("#/rollouts/"))
        # The rollout's styles are not the table's, although the page has both by now.
        # Nobody chose its id: it has a name of its task, a number and its agent.
        name = re.compile("^Rollout from-the-form · [0-9a-f]{4} · shell$")
        await expect(page.get_by_role("heading", level=1)).to_have_text(name)
        await page.go_back()
        await expect(line.locator(".name")).to_have_text(re.compile("^[0-9a-f]{4}$"))
        await expect(line.locator(".reward")).to_have_css("display", "block")
        await expect(line.locator(".tokens")).to_have_css("font-size", "14px")
        # Its run is one of the runs, with its reward.
        await page.goto(f"{address}#/runs")
        await page.get_by_role("link", name=run_id).click()
        await expect(page.get_by_role("heading", level=1)).to_have_text(f"Run {run_id}")
        await expect(page.locator(".figures")).to_contain_text("Mean reward0.5")
        await expect(page.get_by_role("table", name="Tasks").get_by_role("row")).to_have_count(2)


@pytest.mark.requirement("R5")
async def test_read_only_token_is_recognised_and_a_wrong_one_replaced(
    browser: Browser, address: str, stack: Running
) -> None:
    """What a token may not do is said in words; a new token is taken at once, without loading anything again."""
    async with looking(browser, address, "not-a-token", "/") as page:
        alert = page.get_by_role("alert")
        await expect(alert).to_contain_text("The token is invalid for this service")
        assert (await alert.inner_text()).count("The token is invalid for this service") == 1
        await expect(page.locator(".figures dd").first).not_to_have_text(re.compile("[0-9]"))
        await expect(page.get_by_text("Nothing is known of any rollout yet.")).to_be_visible()
        await page.get_by_role("button", name="Token", exact=True).click()
        await page.get_by_label("Token", exact=True).last.fill(OBSERVER_TOKEN)
        await page.get_by_role("button", name="Use it").click()
        await expect(alert).to_have_count(0)
        await expect(page.get_by_text(re.compile("[0-9]+ rollouts|Nothing has run yet")).first).to_be_visible()

        await page.keyboard.press("n")
        await page.get_by_label("Instruction").fill("anything")
        await page.get_by_role("button", name="Start the rollout").click()
        await expect(alert).to_contain_text("This token may not start the rollout")


@pytest.mark.requirement("R30", "R88")
async def test_the_services_show_queue_credits_engine_and_sandboxes(
    browser: Browser, address: str, stack: Running
) -> None:
    """A call that waits is seen to wait, with whom it could be, and what its sandbox uses."""
    run_id = f"run-{secrets.token_hex(4)}"
    async with looking(browser, address, OBSERVER_TOKEN, "/services") as page:
        gate = page.get_by_role("region", name="Gate")
        await expect(gate).to_contain_text("Calls that wait")
        await expect(page.get_by_role("region", name="Inference")).to_contain_text("Policy version")
        await expect(page.get_by_role("region", name="Inference")).to_contain_text(re.compile("Model .+, served by .+"))
        rollout = await stack.ps.rollouts.create(Task(task_id="waits", instruction="wait"), "shell", run_id=run_id)
        try:
            sandboxes = page.get_by_role("region", name="Sandboxes")
            await expect(sandboxes.get_by_title(rollout.rollout_id)).to_be_visible(timeout=120_000)
            await expect(gate).to_contain_text("No trainer is connected", timeout=120_000)
            async with stack.ps.intercept(run_id=run_id, credits=3, identity="a-trainer") as session:
                row = gate.get_by_role("row").filter(has_text="a-trainer")
                await expect(row).to_contain_text("1 of 3 held", timeout=120_000)
                await expect(row).to_contain_text(f"run {run_id}")
                del session
        finally:
            await rollout.cancel()


@pytest.mark.requirement("R71")
async def test_a_thousand_rollouts_are_a_table_of_what_is_in_sight(browser: Browser, tmp_path: Path) -> None:
    """A thousand rows cost as much as a screen of them, by keyboard too, and are told as they change."""
    async with many(tmp_path, 1000) as (driver, at), looking(browser, at, "any", "/") as page:
        table = page.get_by_role("table", name="Rollouts")
        await expect(table).to_have_attribute("aria-rowcount", "1001")
        lines = page.locator(".rollouts .line")
        assert await lines.count() < 80

        await page.keyboard.press("j")
        await expect(page.locator(".line:focus")).to_contain_text("row-0999")
        await page.keyboard.press("End")
        await expect(page.locator(".line:focus")).to_contain_text("row-0000")
        await expect(page.locator(".line:focus")).to_be_in_viewport()
        assert await lines.count() < 80
        # What an agent's author wrote is text: `looking` fails on the dialog that it asks for.
        await expect(lines.filter(has_text="<img src=x onerror=alert(1)>")).to_have_count(1)

        # The keys that hold for a row are listed, and the one that cancels asks first.
        await page.keyboard.press("c")
        asked = page.get_by_role("dialog", name="Cancel this rollout?")
        await expect(asked).to_contain_text("row-0000")
        await page.keyboard.press("Escape")
        await expect(asked).to_be_hidden()
        await page.keyboard.press("?")
        await expect(page.get_by_role("dialog", name="Keys")).to_contain_text("cancel the rollout")
        await page.keyboard.press("Escape")

        await page.keyboard.press("/")
        await page.keyboard.type("label:shard=3 row-000")
        await expect(table).to_have_attribute("aria-rowcount", "3")
        await driver.end("row-0003", 0.75)
        await expect(lines.filter(has_text="row-0003").locator(".reward")).to_have_text("0.75")
        await expect(lines.filter(has_text="row-0003").locator(".state")).to_have_text("completed")
        await page.get_by_role("button", name="Live").click()
        await expect(table).to_have_attribute("aria-rowcount", "2")
        await page.get_by_label("Filter the rollouts").fill("stat:faild")
        await expect(table).to_contain_text("There is no key stat:; did you mean state:?")


@pytest.mark.requirement("R27", "R58")
async def test_dead_and_outdated_services_are_named_and_the_page_recovers(browser: Browser, tmp_path: Path) -> None:
    """Nobody reloads anything: rows stay in sight, the trouble is named, and goes when it is over."""
    async with many(tmp_path, 3) as (driver, at), looking(browser, at, "any", "/") as page:
        lines, alert = page.locator(".rollouts .line"), page.get_by_role("alert")
        await expect(lines).to_have_count(3)
        await driver.stop()
        await expect(alert).to_contain_text("No answer", timeout=60_000)
        await expect(lines).to_have_count(3)
        await driver.start(old=True)
        await expect(alert).to_contain_text("too old", timeout=60_000)
        await page.get_by_role("button", name="Try now").click()
        await driver.stop()
        await driver.start()
        await driver.end("row-0001", 0.25)
        # The button may be gone: the page tries by itself too.
        await page.evaluate("dispatchEvent(new Event('online'))")
        await expect(alert).to_have_count(0, timeout=60_000)
        await expect(lines.filter(has_text="row-0001").locator(".reward")).to_have_text("0.25")
        # Nor is the page's own server there: what a browser says of it says nothing.
        await page.evaluate("() => { window.fetch = () => Promise.reject(new TypeError('Failed to fetch')); }")
        await driver.stop()
        await expect(alert).to_contain_text(f"The dashboard at {urlsplit(at).netloc} does not answer", timeout=60_000)
        await expect(alert).to_contain_text("The page shows the state of")
        await expect(alert).not_to_contain_text("Failed to fetch")


async def test_dashboard_works_on_a_phone_by_keyboard_and_asks_for_a_token(browser: Browser, tmp_path: Path) -> None:
    """What is shown fits a phone; keys are listed; the way in is said."""
    async with many(tmp_path, 20) as (_, at):
        async with looking(browser, at, "any", "/", width=360, height=720, scheme="dark") as page:
            await expect(page.locator(".rollouts .line").first).to_be_visible()
            assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth")
            await page.keyboard.press("?")
            keys = page.get_by_role("dialog", name="Keys")
            await expect(keys).to_contain_text("filter the rollouts")
            await page.keyboard.press("Escape")
            await expect(keys).to_be_hidden()
        async with looking(browser, at, "", "/") as page:
            await expect(page.get_by_role("heading", name="No token yet")).to_be_visible()
