"""Codecs by the digests of their files, loaded once and kept on disk, so a restart needs no inference service."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Mapping
from concurrent.futures import Executor
from pathlib import Path
from typing import Final

from penstock_chassis.aio.single_flight import SingleFlight
from penstock_codec import Codec
from penstock_codec.images import RULE_FILE
from penstock_codec.tokenizer_files import TokenizerFiles
from penstock_interception.domain.calls import CodecChoice, ModelFacts

LOADED_KEPT: Final = 32

Key = tuple[str, str, str, CodecChoice]
FILE_NAMES = frozenset(
    {
        "tokenizer.json",
        "chat_template.jinja",
        "tokenizer_config.json",
        "generation_config.json",
        "config.json",
        RULE_FILE,
    }
)


class CodecCache:
    """Loaded codecs, and a directory with the files of every codec used so far."""

    def __init__(self, directory: Path, pool: Executor) -> None:
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._pool = pool
        self._loaded: SingleFlight[Key, Codec] = SingleFlight(keep=LOADED_KEPT)
        self.fetching = asyncio.Lock()
        """Held while missing files are fetched: a first step's many rollouts fetch them only once."""
        self._keeping = asyncio.Lock()

    def known(self, facts: ModelFacts) -> bool:
        """Returns whether the files are on disk."""
        return self._path(facts.tokenizer_sha256, facts.template_sha256, facts.processor_sha256).is_dir()

    async def from_files(self, files: TokenizerFiles, choice: CodecChoice) -> Codec:
        """Stores these files and returns their codec. Raises CodecError."""
        digests = files.tokenizer_sha256, files.template_sha256, files.processor_sha256
        path = self._path(*digests)
        async with self._keeping:
            if not path.is_dir():
                await asyncio.get_running_loop().run_in_executor(self._pool, _keep, files, path)
        return await self._load((*digests, choice))

    async def from_named(self, named: Mapping[str, bytes], choice: CodecChoice) -> Codec:
        """As `from_files`, for files by name as an inference service sends them. Raises CodecError."""

        def read() -> TokenizerFiles:
            with tempfile.TemporaryDirectory(dir=self._directory) as place:
                for name in FILE_NAMES & named.keys():
                    (Path(place) / name).write_bytes(named[name])
                return TokenizerFiles.from_directory(place)

        return await self.from_files(await asyncio.get_running_loop().run_in_executor(self._pool, read), choice)

    async def of(self, facts: ModelFacts) -> Codec | None:
        """Returns the codec of a known model; None for a model without a tokenizer. Raises CodecError."""
        if not facts.tokenizer_sha256:
            return None
        return await self._load((facts.tokenizer_sha256, facts.template_sha256, facts.processor_sha256, facts.codec))

    async def _load(self, key: Key) -> Codec:
        return await self._loaded.get(key, lambda: self._read(key))

    async def _read(self, key: Key) -> Codec:
        *digests, choice = key

        def load() -> Codec:
            files = TokenizerFiles.from_directory(self._path(*digests))
            return Codec.load(files, parser=choice.parser or None, control_tokens=choice.control_tokens)

        return await asyncio.get_running_loop().run_in_executor(self._pool, load)

    def _path(self, *digests: str) -> Path:
        return self._directory / "-".join(digest[:32] for digest in digests if digest)


def _keep(files: TokenizerFiles, path: Path) -> None:
    fresh = path.with_name(path.name + ".new")
    shutil.rmtree(fresh, ignore_errors=True)  # left by a start that was killed here
    files.write(fresh)
    if not path.exists():
        fresh.rename(path)
