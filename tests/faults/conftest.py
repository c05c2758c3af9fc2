"""One restartable stack for this folder: its tests kill its services and leave it whole."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from tests.support.services.restarting import RestartableStack, restartable
from tests.support.services.stack import Running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fragile(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[Running, RestartableStack]]:
    """A stack whose services may be killed, with its client."""
    async with restartable(tmp_path_factory.mktemp("fragile")) as started:
        yield started
