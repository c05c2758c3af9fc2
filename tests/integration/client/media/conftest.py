"""Services whose model takes images; the other tests of the client have one of text."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from tests.support import vision

from penstock.client import Penstock, connect
from penstock.local.stack import LocalStack


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def ps(tmp_path_factory: pytest.TempPathFactory, script: Path) -> AsyncIterator[Penstock]:
    """A client of services whose model takes images."""
    folder = tmp_path_factory.mktemp("vision")
    vision.tokenizer_files().write(folder / "model")
    made = LocalStack(
        model_dir=folder / "model",
        engine="scripted",
        engine_options={"script": str(script)},
        state_dir=folder / "state",
    )
    async with made, connect(made.endpoints) as client:
        yield client
