"""The dashboard with a thousand rollouts that run: how soon it is useful, how late it tells, what it costs.

The driver's stream of rows over a journal, the gateway and nothing else run in this process; the browser is another.
Its CPU time with and without a page, under the same changes, is what a page costs the services' side.
"""

from __future__ import annotations

import asyncio
import resource
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

from tests.support.services.many_rows import Driver, many
from tests.support.terminal.browser import chromium, looking, program

from benchmarks.report import Row, Section, percentile
from penstock_driver.domain.rollout import Phase, PhaseChanged
from penstock_driver.rpc.row_stream import DEFAULT_INTERVAL_S

ROLLOUTS: Final = 1000
PAINTS: Final = 7
UPDATES: Final = 20
CHANGES_A_SECOND: Final = 200
COST_S: Final = 8.0

_PAINTED: Final = """rows => new Promise(resolve => {
    const isThere = () => document.querySelectorAll('.rollouts .line').length > 10
        && document.querySelector('.rollouts').getAttribute('aria-rowcount') === String(rows + 1);
    const painted = () => requestAnimationFrame(() => resolve(performance.now()));
    const observer = new MutationObserver(() => { if (isThere()) { observer.disconnect(); painted(); } });
    observer.observe(document, {subtree: true, childList: true, attributes: true});
    if (isThere()) { observer.disconnect(); painted(); }
})"""
_LOOK: Final = """text => {
    window.seen = new Promise(resolve => {
        const observer = new MutationObserver(() => {
            if (document.querySelector('.rollouts .rows')?.textContent.includes(text)) {
                observer.disconnect();
                resolve(Date.now());
            }
        });
        observer.observe(document, {subtree: true, childList: true, characterData: true});
    });
}"""
_SEEN: Final = "() => window.seen"


async def measure(place: Path) -> list[Section]:
    """First useful paint, update latency, cost. Nothing where there is no browser: the run says so."""
    if program() is None:
        print(
            "the dashboard is not measured: there is no Chromium here (apt-get install chromium-headless-shell)",
            flush=True,
        )
        return []
    async with many(place, ROLLOUTS) as (driver, address), chromium() as browser:
        paints: list[float] = []
        for _ in range(PAINTS):
            async with looking(browser, address, "any", "/") as page:
                paints.append(await page.evaluate(_PAINTED, ROLLOUTS))
        async with looking(browser, address, "any", "/") as page:
            await page.evaluate(_PAINTED, ROLLOUTS)
            late = [await _update(driver, page.evaluate, index) for index in range(UPDATES)]
            with_page = await _cost(driver, 1_000)
        without = await _cost(driver, 100_000)
    rows = [
        Row("first useful paint", percentile(paints, 0.5), "ms", also={"p90": percentile(paints, 0.9)}),
        Row("a change is seen after", percentile(late, 0.5), "ms", also={"p90": percentile(late, 0.9)}),
        Row("CPU, a page in sight", with_page, "ms/s", f"{CHANGES_A_SECOND} changes a second"),
        Row("CPU, no page", without, "ms/s", f"{CHANGES_A_SECOND} changes a second"),
        Row("a page costs", with_page - without, "ms/s", "driver's stream, gateway"),
    ]
    return [Section(f"dashboard, {ROLLOUTS:,} rollouts that run", rows)]


async def _update(driver: Driver, evaluate: Callable[..., Awaitable[Any]], index: int) -> float:
    """Milliseconds from a rollout's end being put in order to its being in the document."""
    reward = round(0.1 + index / 1000, 3)
    await evaluate(_LOOK, f"{reward}")
    await asyncio.sleep(DEFAULT_INTERVAL_S)  # since the last change's message: this one need not wait for its turn
    began = time.time() * 1000
    await driver.end(f"row-{ROLLOUTS - 1 - index:04d}", reward)
    seen: float = await evaluate(_SEEN)
    return seen - began


async def _cost(driver: Driver, first: int) -> float:
    """This process's CPU time in milliseconds a second while rollouts change at a steady pace; `first` begins their
    events' numbers."""
    before, began = _cpu(), time.perf_counter()
    count = 0
    while (gone := time.perf_counter() - began) < COST_S:
        while count < gone * CHANGES_A_SECOND:
            rollout_id, sequence = f"row-{count % (ROLLOUTS - 10):04d}", first + count
            driver.history.append(rollout_id, None, sequence, PhaseChanged(Phase.RUNNING), is_summary=True)
            count += 1
        await asyncio.sleep(0.02)
    await driver.history.flush()
    return 1000 * (_cpu() - before) / (time.perf_counter() - began)


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
