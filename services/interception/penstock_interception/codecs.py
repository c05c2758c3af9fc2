"""Codecs by the digests of their files: each loaded once, kept on disk so that a restart needs no inference service."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Mapping
from concurrent.futures import Executor
from pathlib import Path
from typing import Final

from penstock_chassis.single_flight import SingleFlight
from penstock_codec import Codec
from penstock_codec.files import TokenizerFiles
from penstock_interception.calls import CodecChoice, ModelFacts

LOADED_KEPT: Final = 32

Key = tuple[str, str, CodecChoice]
FILE_NAMES = frozenset(
    {"tokenizer.json", "chat_template.jinja", "tokenizer_config.json", "generation_config.json", "config.json"}
)


class CodecCache:
    """Loaded codecs, and a directory with the files of every one that was ever used here."""

    def __init__(self, directory: Path, pool: Executor) -> None:
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._pool = pool
        self._loaded: SingleFlight[Key, Codec] = SingleFlight(keep=LOADED_KEPT)
        self.fetching = asyncio.Lock()
        """Held by whoever fetches files that are not here: the many rollouts of a first step fetch them once."""
        self._keeping = asyncio.Lock()

    def known(self, tokenizer_sha256: str, template_sha256: str) -> bool:
        """Whether the files are here."""
        return self._path(tokenizer_sha256, template_sha256).is_dir()

    async def from_files(self, files: TokenizerFiles, choice: CodecChoice) -> Codec:
        """The codec of these files, which are kept. Raises CodecError."""
        path = self._path(files.tokenizer_sha256, files.template_sha256)
        async with self._keeping:
            if not path.is_dir():
                await asyncio.get_running_loop().run_in_executor(self._pool, _keep, files, path)
        return await self._load((files.tokenizer_sha256, files.template_sha256, choice))

    async def from_named(self, named: Mapping[str, bytes], choice: CodecChoice) -> Codec:
        """The same for files by name, as an inference service sends them. Raises CodecError."""

        def read() -> TokenizerFiles:
            with tempfile.TemporaryDirectory(dir=self._directory) as place:
                for name in FILE_NAMES & named.keys():
                    (Path(place) / name).write_bytes(named[name])
                return TokenizerFiles.from_directory(place)

        return await self.from_files(await asyncio.get_running_loop().run_in_executor(self._pool, read), choice)

    async def of(self, facts: ModelFacts) -> Codec | None:
        """The codec of a model seen before; None for one without a tokenizer. Raises CodecError."""
        if not facts.tokenizer_sha256:
            return None
        return await self._load((facts.tokenizer_sha256, facts.template_sha256, facts.codec))

    async def _load(self, key: Key) -> Codec:
        return await self._loaded.get(key, lambda: self._read(key))

    async def _read(self, key: Key) -> Codec:
        tokenizer, template, choice = key

        def load() -> Codec:
            files = TokenizerFiles.from_directory(self._path(tokenizer, template))
            return Codec.load(files, parser=choice.parser or None, control_tokens=choice.control_tokens)

        return await asyncio.get_running_loop().run_in_executor(self._pool, load)

    def _path(self, tokenizer_sha256: str, template_sha256: str) -> Path:
        return self._directory / f"{tokenizer_sha256[:32]}-{template_sha256[:32]}"


def _keep(files: TokenizerFiles, path: Path) -> None:
    fresh = path.with_name(path.name + ".new")
    shutil.rmtree(fresh, ignore_errors=True)  # of a start that was killed here
    files.write(fresh)
    if not path.exists():
        fresh.rename(path)
