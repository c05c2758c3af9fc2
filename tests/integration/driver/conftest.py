"""The driver among the real services, used through the public client."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from tests.integration.driver.stack import TOKEN, Stack, running

from penstock.client import Penstock, connect
from penstock_codec import Codec, tiny_tokenizer
from penstock_codec.tokenizer_files import TokenizerFiles

TEXTS = (
    "You are a shell agent.",
    "copy note.txt to out.txt",
    "cat note.txt > out.txt",
    "bash command",
    "done",
    "exit 1",
)


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small tokenizer with a tool-calling template."""
    directory = tmp_path_factory.mktemp("tiny")
    tiny_tokenizer.build(TEXTS).write(directory)
    return directory


@pytest.fixture(scope="session")
def codec(tokenizer_dir: Path) -> Codec:
    """The codec of that tokenizer, as a trainer with its own engine has it."""
    return Codec.load(TokenizerFiles.from_directory(tokenizer_dir))


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, tokenizer_dir: Path) -> Iterator[Stack]:
    """Services shared by a module's tests."""
    with running(tmp_path_factory.mktemp("stack"), {"tiny": str(tokenizer_dir)}) as stack:
        yield stack


@pytest.fixture
async def penstock(stack: Stack) -> AsyncIterator[Penstock]:
    """A client of the stack."""
    addresses = {
        "driver": stack.driver.address,
        "interception": stack.interception.address,
        "sandbox": stack.sandbox.address,
    }
    async with connect(addresses, TOKEN) as client:
        yield client
