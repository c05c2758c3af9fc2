"""The real services, started as `penstock up` starts them, with an engine that follows a script."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from tests.support.copy_script import COPY_SCRIPT

from penstock.client import Command, Penstock, RewardFrom, SeedFile, Task, Verifier, connect
from penstock.local.stack import LocalStack
from penstock_codec import tiny_tokenizer
from penstock_codec.codec import Codec
from penstock_codec.tokenizer_files import TokenizerFiles

TASK = Task(
    task_id="copy-note",
    instruction="Copy note.txt to out.txt. Mind 'quotes', $(this) and `that`.",
    files=[SeedFile("note.txt", b"the word\n")],
    setup=[Command(["test", "-f", "note.txt"])],
    verifier=Verifier(
        commands=[Command(shell='grep -q "the word" out.txt && echo 0.75 > "$PENSTOCK_REWARD_FILE"')],
        reward=RewardFrom.FILE,
    ),
    metadata={"level": 1},
)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer and a template, which is all that the scripted engine needs."""
    folder = tmp_path_factory.mktemp("model")
    tiny_tokenizer.build().write(folder)
    return folder


@pytest.fixture(scope="session")
def codec(model_dir: Path) -> Codec:
    """The tokenizer of the stack."""
    return Codec.load(TokenizerFiles.from_directory(model_dir))


@pytest.fixture(scope="session")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the engine answers."""
    file = tmp_path_factory.mktemp("script") / "script.yaml"
    file.write_text(COPY_SCRIPT)
    return file


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def stack(tmp_path_factory: pytest.TempPathFactory, model_dir: Path, script: Path) -> AsyncIterator[LocalStack]:
    """All four services, once for all tests."""
    made = LocalStack(
        model_dir=model_dir,
        engine="scripted",
        engine_options={"script": str(script)},
        state_dir=tmp_path_factory.mktemp("state"),
    )
    async with made:
        yield made


@pytest_asyncio.fixture(loop_scope="session")
async def ps(stack: LocalStack) -> AsyncIterator[Penstock]:
    """A client of them."""
    async with connect(stack.endpoints) as client:
        yield client


@pytest.fixture(autouse=True)
def _no_surroundings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No test sees the connection file of whoever runs it."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "xdg"))
