"""A headless Chromium that looks at a dashboard, and fails whatever a page must never do."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import quote, urlsplit

from playwright.async_api import Browser, ConsoleMessage, Dialog, Page, Request, async_playwright, expect
from tests.support.waiting import GUARD_S

from penstock.client.transport.endpoints import Endpoints
from penstock.dashboard.serving import Place, serve

# For every test: five seconds, which it is else, are too few where others use the machine.
expect.set_options(timeout=1000 * GUARD_S)


def program() -> str | None:
    """The machine's own Chromium; None = it has none.

    First the build without windows: a page costs it two thirds of the time of a processor.
    """
    names = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
    return next(filter(None, map(shutil.which, names)), None)


@asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
    """The machine's own Chromium; an AssertionError names the package that has it."""
    path = program()
    assert path, "there is no Chromium here: apt-get install chromium-headless-shell"
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            await browser.close()


@asynccontextmanager
async def dashboard(endpoints: Endpoints) -> AsyncIterator[str]:
    """A dashboard of some services on a free port; yields its address."""
    async with serve(endpoints, Place(port=0)) as shown:
        yield shown.address


@asynccontextmanager
async def looking(
    browser: Browser,
    address: str,
    token: str,
    route: str,
    *,
    width: int = 1280,
    height: int = 900,
    scheme: str = "light",
) -> AsyncIterator[Page]:
    """A page at a route of the dashboard, with a token.

    On leaving, an AssertionError when the page wrote an error (each violation of its content security policy is one),
    broke, opened a dialog or another window, or asked for anything that is not the dashboard's.
    """
    context = await browser.new_context(
        viewport={"width": width, "height": height},
        color_scheme="dark" if scheme == "dark" else "light",
        reduced_motion="reduce",
    )
    context.set_default_timeout(1000 * GUARD_S)
    problems: list[str] = []
    page = await context.new_page()
    origin = urlsplit(address).netloc

    def console(message: ConsoleMessage) -> None:
        if message.type == "error":
            problems.append(f"console: {message.text}")

    def request(asked: Request) -> None:
        if urlsplit(asked.url).netloc != origin and not asked.url.startswith(("blob:", "data:")):
            problems.append(f"request: {asked.url}")

    async def dialog(opened: Dialog) -> None:
        problems.append(f"dialog: {opened.message}")
        await opened.dismiss()

    page.on("console", console)
    page.on("pageerror", lambda error: problems.append(f"error: {error}"))
    page.on("request", request)
    page.on("dialog", dialog)
    page.on("popup", lambda opened: problems.append(f"popup: {opened.url}"))
    try:
        await page.goto(f"{address}#token={quote(token, safe='')}&go={quote(route, safe='')}")
        yield page
        assert problems == [], problems
    finally:
        await context.close()
