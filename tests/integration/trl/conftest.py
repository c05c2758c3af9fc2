"""A model that uses its tool now and then, and the services that run its rollouts, for the real TRL.

Run by `make test-trl`, which has an environment of its own.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import ModuleType

import pytest
import pytest_asyncio

from penstock.local.stack import LocalStack
from penstock_inference.testing.table_models import CallingModel

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "trl" / "train.py"


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model, for the engine and for Transformers."""
    model = CallingModel("bash", {"command": "echo yes >> said.txt"})
    return model.write(tmp_path_factory.mktemp("model"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalStack]:
    """All four services, with the engine that needs nothing but numpy."""
    async with LocalStack(model_dir=model_dir, state_dir=tmp_path_factory.mktemp("state")) as made:
        yield made


@pytest.fixture(scope="module")
def example() -> ModuleType:
    """The program of examples/trl, as a module."""
    spec = importlib.util.spec_from_file_location("examples_trl_train", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
