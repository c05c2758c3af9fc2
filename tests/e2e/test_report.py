"""The report of an evaluation in a browser."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.terminal.browser import chromium

from penstock.evaluation import Attempt, summarise
from penstock.evaluation.report import write_report


@pytest.mark.parametrize("width", [390, 1280])
async def test_the_report_is_read_on_a_telephone_too(width: int, tmp_path: Path) -> None:
    """Issue 6, point 6: what is wider than the screen scrolls by itself, and the page does not; names stay readable."""
    names = ["sort-the-lines-of-a-very-long-file-by-their-second-column", "half"]
    attempts = [
        Attempt(task_id=name, index=index, again=0, rollout_id=f"{name}-{index}", reward=index / 2, seconds=12.5)
        for name in names
        for index in range(3)
    ]
    config = {"name": "tasks", "agent": "opencode", "model": "a-model-with-a-long-name", "mode": "transparent_proxy"}
    write_report(tmp_path / "report.html", config, attempts, summarise(attempts, names, 3))
    async with chromium() as browser:
        context = await browser.new_context(viewport={"width": width, "height": 844})
        page = await context.new_page()
        await page.goto((tmp_path / "report.html").as_uri())
        assert await page.evaluate("document.documentElement.scrollWidth") <= width
        cells = page.locator("table td:first-child")
        assert await cells.count() == len(names)
        widths = [await cells.nth(number).evaluate("cell => cell.clientWidth") for number in range(len(names))]
        assert min(widths) >= 120, widths
