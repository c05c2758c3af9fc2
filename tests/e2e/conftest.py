"""A browser, and the dashboard of the suite's stack."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio
from playwright.async_api import Browser
from tests.support.services.stack import Running
from tests.support.terminal.browser import chromium, dashboard


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def browser() -> AsyncIterator[Browser]:
    """One for all tests of a file."""
    async with chromium() as opened:
        yield opened


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def address(stack: Running) -> AsyncIterator[str]:
    """Of the stack's dashboard."""
    async with dashboard(stack.stack.endpoints) as shown:
        yield shown
