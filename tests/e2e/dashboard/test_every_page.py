"""Every page of the dashboard in both themes, on a desk and on a phone."""

from __future__ import annotations

import os
import re
import secrets
from pathlib import Path
from typing import Final

import pytest
import pytest_asyncio
from playwright.async_api import Browser, Page, expect
from tests.e2e import rollout_cases as cases
from tests.support.services.stack import OBSERVER_TOKEN, Running
from tests.support.terminal.browser import looking
from tests.support.terminal.layout import unreadable

from penstock.client import Budgets

ROUTES: Final = Path(__file__).resolve().parents[3] / "clients" / "web" / "src" / "routes.ts"
SIZES: Final = {"desk": (1280, 900), "phone": (375, 812)}
KEPT: Final = os.environ.get("PENSTOCK_TEST_PICTURES")
"""A directory for a picture of each page in each form, for a person to look at; none are made without it."""


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def pages(stack: Running) -> dict[str, tuple[str, str]]:
    """By pattern of a route: a place of it, and the selector of what it shows of a group that has ended."""
    run_id = f"run-{secrets.token_hex(4)}"
    async with cases.answering(stack.ps, cases.by_index(cases.STATS_TURNS), run_id):
        made = await stack.ps.groups.create(
            cases.stats_task(), "shell", 4, run_id=run_id, budgets=Budgets(max_calls=4), labels={"step": "0"}
        )
        first = (await made.results())[0].rollout
    return {
        "/": ("/", ".rollouts .line"),
        "/runs": ("/runs", "table tbody tr"),
        "/runs/:id": (f"/runs/{run_id}", "svg circle"),
        "/tasks": ("/tasks", "table tbody tr"),
        "/tasks/:id": ("/tasks/repair-stats", "table tbody tr"),
        "/tasks/:id/versions": ("/tasks/repair-stats/versions", "table tbody tr"),
        "/agents": ("/agents", "table tbody tr"),
        "/agents/:id": ("/agents/shell", "table tbody tr"),
        "/new": ("/new", "form textarea"),
        "/services": ("/services", "main table tbody tr"),
        "/rollouts/:id": (f"/rollouts/{first.rollout_id}", "article.turn"),
        "/groups/:id": (f"/groups/{first.group_id}", ".siblings-table tbody tr"),
    }


@pytest.mark.requirement("R71", "R74")
async def test_every_page_fits_in_both_themes_on_a_desk_and_on_a_phone(
    browser: Browser, address: str, pages: dict[str, tuple[str, str]]
) -> None:
    """No page scrolls sideways or has text outside of the window; `looking` fails an error in the console."""
    assert set(re.findall(r'pattern: "([^"]+)"', ROUTES.read_text())) == set(pages)
    wrong = dict[str, list[str]]()
    async with looking(browser, address, OBSERVER_TOKEN, "/") as page:
        for pattern, (place, shown) in pages.items():
            await page.goto(f"{address}#{place}")
            await expect(page.locator(shown).first).to_be_visible()
            await expect(page.get_by_role("alert")).to_have_count(0)
            for size, (width, height) in SIZES.items():
                await page.set_viewport_size({"width": width, "height": height})
                for scheme in ("light", "dark"):
                    await page.emulate_media(color_scheme="dark" if scheme == "dark" else "light")
                    found = await unreadable(page)
                    if found:
                        wrong[f"{pattern} {scheme} {size}"] = found
                    await _keep(page, f"{pattern} {size} {scheme}")
            await page.set_viewport_size({"width": 1280, "height": 900})
    assert wrong == {}


async def _keep(page: Page, name: str) -> None:
    if KEPT:
        file = re.sub("[^a-z]+", "-", name).strip("-") or "overview"
        await page.screenshot(path=Path(KEPT) / f"{file}.png", full_page=True)
