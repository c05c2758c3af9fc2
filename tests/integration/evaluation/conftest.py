"""Four real services, with an engine that follows a script, and pytest where sandboxes see it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from importlib.metadata import distribution
from pathlib import Path

import pytest
import pytest_asyncio
from tests.support.services.stack import Running, running

SITE_PACKAGES = Path(str(distribution("pytest").locate_file("")))


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def stack_with_pytest(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Running]:
    """As `stack`; sandboxes see this environment's packages, read-only."""
    settings = {"sandbox": {"extra_read_only": [str(SITE_PACKAGES)]}}
    async with running(tmp_path_factory.mktemp("stack"), settings) as started:
        yield started
