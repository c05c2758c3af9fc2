"""Draws the pictures of the dashboard's guide from made-up runs: `python -m tools.pictures` (needs Chromium).

The page must be built before: `make dashboard`.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from playwright.async_api import Browser
from tests.support.services.trained_rows import TASKS, trained
from tests.support.terminal.browser import chromium, looking

_IMAGES: Final = Path(__file__).resolve().parents[1] / "docs" / "images"
_RUNS: Final = {"grpo-a": 0.7, "grpo-b": 0.4, "sft": 0.05}
_STEPS: Final = 30
_TASKS: Final = tuple("bump-version" if task.startswith("<") else task for task in TASKS)
"""Without the name that is to break a page."""
_FIRST: Final = {"grpo-a": 0.7, "grpo-b": 0.4}
_FIRST_STEPS: Final = 20
"""So that the first page, which has the newest 2,000 rollouts, has all of them."""


async def main() -> None:
    """Writes dashboard.png, runs.png and run-metrics.png in docs/images."""
    async with chromium() as browser:
        await _first_page(browser)
        await _runs(browser)


async def _first_page(browser: Browser) -> None:
    async with (
        _served(_FIRST, _FIRST_STEPS) as address,
        looking(browser, address, "any", "/?smooth=3", width=1280, height=800) as page,
    ):
        await page.locator("path.band").nth(1).wait_for()
        await page.screenshot(path=_IMAGES / "dashboard.png")


async def _runs(browser: Browser) -> None:
    async with _served(_RUNS, _STEPS) as address:
        route = "/runs/grpo-a?with=grpo-b&with=sft&smooth=5"
        async with looking(browser, address, "any", route, width=1280, height=900) as page:
            await page.locator("path.band").first.wait_for()
            await page.screenshot(path=_IMAGES / "runs.png")
        async with looking(browser, address, "any", route, width=1280, height=640) as page:
            await page.get_by_role("region", name="optimizer/grad_norm").wait_for()
            logged = page.get_by_role("heading", name="Logged by the trainer")
            await logged.evaluate("heading => window.scrollTo(0, heading.getBoundingClientRect().top - 80)")
            await page.screenshot(path=_IMAGES / "run-metrics.png")


@asynccontextmanager
async def _served(runs: Mapping[str, float], steps: int) -> AsyncIterator[str]:
    with TemporaryDirectory() as place:
        async with trained(Path(place), runs, steps, time.time() - 60 * steps, _TASKS) as (_, address):
            yield address


if __name__ == "__main__":
    asyncio.run(main())
