"""Draws the pictures of the guides of the dashboard and of evaluations: `python -m tools.pictures [PART ...]`.

It needs Chromium and matplotlib, and the built page (`make dashboard`). Four parts, all without arguments: `first` and
`runs` (made-up runs of a driver: first page; runs, tasks, agents), `rollouts` (a real group of the agent `shell`:
rollout, group, services, form) and `evaluation` (a real evaluation of two agents with the scripted engine, whose tasks
are won by chance; it prints the matrix that docs/guides/eval.md shows).
"""

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from playwright.async_api import Browser, Page
from tests.e2e import rollout_cases as cases
from tests.support.services.stack import OBSERVER_TOKEN, running
from tests.support.services.trained_rows import TASKS, trained
from tests.support.terminal.browser import chromium, dashboard, looking
from tests.support.terminal.commands import invoke

from penstock.client import Budgets
from penstock.client.transport.endpoints import write_connection

_IMAGES: Final = Path(__file__).resolve().parents[1] / "docs" / "images"
_RUNS: Final = {"grpo-a": 0.7, "grpo-b": 0.4, "sft": 0.05}
_STEPS: Final = 30
_TASKS: Final = tuple("bump-version" if task.startswith("<") else task for task in TASKS)
"""Without the name that is to break a page."""
_FIRST: Final = {"grpo-a": 0.7, "grpo-b": 0.4}
_FIRST_STEPS: Final = 20
"""So that the first page, which has the newest 2,000 rollouts, has all of them."""


_WON: Final = {"add-flag": 90, "fix-parser": 70, "greet": 100, "rename-field": 40, "sort-lines": 10}
"""How many of a hundred attempts at each task of the evaluation are won."""
_AGENTS: Final = ("shell", "mini-swe-agent")
_PAGES: Final = {
    "runs-list": "/runs",
    "tasks": "/tasks",
    "task": "/tasks/fix-parser",
    "agents": "/agents",
    "agent": "/agents/codex",
    "versions": "/tasks/fix-parser/versions",
}
"""Pages with a table, by picture."""


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
        for name, route in _PAGES.items():
            async with looking(browser, address, "any", route, width=1280, height=460) as page:
                await page.locator("main table tbody tr").first.wait_for()
                await _draw(page, name)


async def _rollouts(browser: Browser) -> None:
    """A rollout, its group, the services while calls wait, and the form."""
    with TemporaryDirectory() as place:
        async with running(Path(place), agents=False) as stack, dashboard(stack.stack.endpoints) as address:
            script = cases.by_index(cases.STATS_TURNS)
            async with cases.answering(stack.ps, script, "repair"):
                made = await stack.ps.groups.create(
                    cases.stats_task(), "shell", 4, run_id="repair", budgets=Budgets(max_calls=4)
                )
                best = (await made.results())[0].rollout
            waits = await stack.ps.groups.create(cases.stats_task(), "shell", 2, run_id="next")
            async with (
                stack.ps.intercept(run_id="repair", credits=8, identity="a-trainer"),
                looking(browser, address, OBSERVER_TOKEN, f"/rollouts/{best.rollout_id}", height=860) as page,
            ):
                tokens = page.locator("article.turn .tokens").first
                await tokens.focus()
                await page.keyboard.press("ArrowRight")
                await page.locator(".inspector").wait_for()
                await page.evaluate("window.scrollTo(0, 0)")
                await _draw(page, "rollout")
                await page.goto(f"{address}#/groups/{best.group_id}")
                await page.locator(".siblings-table tbody tr").nth(3).wait_for()
                await _draw(page, "group")
                await page.goto(f"{address}#/services")
                await page.get_by_role("region", name="Gate").get_by_text("a-trainer").first.wait_for()
                sandboxes = page.get_by_role("region", name="Sandboxes")
                await sandboxes.get_by_role("row").nth(2).wait_for()
                await _draw(page, "services", height=1100)
                await page.goto(f"{address}#/new")
                # An option of a closed list is never visible.
                await page.locator("option", has_text="shell").first.wait_for(state="attached")
                await page.get_by_label("Agent", exact=True).select_option("shell")
                await _draw(page, "new-rollout", height=900)
            await waits.cancel()


async def _evaluation(browser: Browser) -> None:
    """The report of one agent's evaluation and the matrix of two, whose table is printed."""
    with TemporaryDirectory() as name:
        place = Path(name)
        (place / "state").mkdir()
        (place / "tasks").mkdir()
        for task, won in _WON.items():
            (place / "tasks" / f"{task}.yaml").write_text(
                "instruction: Run work.sh.\n"
                f"files: [{{path: work.sh, content: 'touch tried; [ $((RANDOM % 100)) -ge {won} ] || touch done'}}]\n"
                "verifier: {commands: [test -f tried, test -f done]}\n"
            )
        async with running(place / "state") as stack:
            write_connection(place / "connection.json", stack.stack.endpoints, pid=os.getpid())
            agents = [word for agent in _AGENTS for word in ("--agent", agent)]
            more = ("-n", "4", "--concurrency", "4", "--out", "agents", "--picture", "matrix.png")
            # Beside this process's loop, which the stack needs meanwhile.
            code, out, err = await asyncio.to_thread(
                invoke, "eval", "matrix", "tasks", *agents, *more,
                environment={"PENSTOCK_CONNECTION": str(place / "connection.json")}, cwd=place,
            )  # fmt: skip
            if code:
                sys.exit(err)
            print(out)
        code, _, err = invoke("eval", "report", "agents/shell", cwd=place)
        if code:
            sys.exit(err)
        (_IMAGES / "eval-matrix.png").write_bytes((place / "matrix.png").read_bytes())
        page = await browser.new_page(viewport={"width": 1040, "height": 1000})
        await page.goto((place / "agents" / "shell" / "report.html").as_uri())
        await _draw(page, "eval-report")
        await page.close()


async def _draw(page: Page, name: str, *, height: int = 0) -> None:
    """Writes a picture of what is in the window; `height` changes the window's, in pixels."""
    if height:
        await page.set_viewport_size({"width": 1280, "height": height})
    # Two frames: charts are drawn again for a new size.
    await page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    await page.screenshot(path=_IMAGES / f"{name}.png")


@asynccontextmanager
async def _served(runs: Mapping[str, float], steps: int) -> AsyncIterator[str]:
    with TemporaryDirectory() as place:
        async with trained(Path(place), runs, steps, time.time() - 60 * steps, _TASKS) as (_, address):
            yield address


_PARTS: Final[Mapping[str, Callable[[Browser], Awaitable[None]]]] = {
    "first": _first_page,
    "runs": _runs,
    "rollouts": _rollouts,
    "evaluation": _evaluation,
}


async def main(wanted: list[str]) -> None:
    """Writes the pictures of some parts, or of all, in docs/images."""
    if unknown := sorted(set(wanted) - set(_PARTS)):
        sys.exit(f"There is no part {', '.join(unknown)}; there are {', '.join(_PARTS)}.")
    async with chromium() as browser:
        for part in wanted or _PARTS:
            await _PARTS[part](browser)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
