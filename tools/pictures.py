"""Draws the pictures of the dashboard's guide from made-up runs: `python -m tools.pictures` (needs Chromium).

The page must be built before: `make dashboard`.
"""

import asyncio
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from tests.support.services.trained_rows import trained
from tests.support.terminal.browser import chromium, looking

_IMAGES: Final = Path(__file__).resolve().parents[1] / "docs" / "images"
_RUNS: Final = {"grpo-a": 0.7, "grpo-b": 0.4, "sft": 0.05}
_STEPS: Final = 30


async def main() -> None:
    """Writes runs.png and run-metrics.png in docs/images."""
    began = time.time() - 60 * _STEPS
    with TemporaryDirectory() as place:
        async with (
            trained(Path(place), _RUNS, _STEPS, began) as (_, address),
            chromium() as browser,
        ):
            route = "/runs/grpo-a?with=grpo-b&with=sft&smooth=5"
            async with looking(browser, address, "any", route, width=1280, height=900) as page:
                await page.locator("path.band").first.wait_for()
                await page.screenshot(path=_IMAGES / "runs.png")
            async with looking(browser, address, "any", route, width=1280, height=640) as page:
                await page.get_by_role("region", name="optimizer/grad_norm").wait_for()
                logged = page.get_by_role("heading", name="Logged by the trainer")
                await logged.evaluate("heading => window.scrollTo(0, heading.getBoundingClientRect().top - 80)")
                await page.screenshot(path=_IMAGES / "run-metrics.png")


if __name__ == "__main__":
    asyncio.run(main())
