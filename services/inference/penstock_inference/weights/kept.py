"""The files of the pushes that made the weights in force, kept for engines that come later.

A push of all tensors replaces what was kept; one of some tensors is added to it. Together they never have more than
`max_bytes`: what would be more is not kept, and engines that come later wait for the next push of all tensors.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog

from penstock_inference.domain.weights import UpdateFormat

_log = structlog.get_logger("penstock.inference")


@dataclass(frozen=True, slots=True)
class KeptPush:
    """One push.

    Attributes:
        version: that it put in force.
        base: the version that was in force before.
        update_format: all tensors, or some.
        digest: SHA-256 of the file; empty for a path.
        file: the kept file; None for a path.
        path: that the push named, below the weights directory; empty for a file.
    """

    version: int
    base: int
    update_format: UpdateFormat
    digest: bytes = b""
    file: Path | None = None
    path: str = ""

    @property
    def size(self) -> int:
        """Bytes on disk."""
        return self.file.stat().st_size if self.file is not None else 0


class KeptPushes:
    """See the module. `directory` is this object's own."""

    def __init__(self, directory: Path, max_bytes: int) -> None:
        self._directory = directory
        self._max_bytes = max_bytes
        self._pushes: tuple[KeptPush, ...] = ()
        self._staged = 0

    @property
    def newest(self) -> int | None:
        """The version that the kept pushes lead to; None = nothing is kept."""
        return self._pushes[-1].version if self._pushes else None

    def since(self, version: int) -> Sequence[KeptPush]:
        """The pushes that an engine with this version lacks, in order; none if they cannot lead from there."""
        lacking = [push for push in self._pushes if push.version > version]
        full = [n for n, push in enumerate(lacking) if push.update_format is UpdateFormat.FULL]
        lacking = lacking[full[-1] :] if full else lacking
        leads = bool(lacking) and (lacking[0].update_format is UpdateFormat.FULL or lacking[0].base == version)
        return lacking if leads else ()

    async def stage(self, source: bytes | Path) -> Path:
        """Returns a file with this content, which `add` or `drop` takes. A given file may be moved away afterwards."""
        self._staged += 1
        staged = self._directory / f"push-{self._staged}.safetensors"
        if isinstance(source, Path):
            await asyncio.to_thread(os.link, source, staged)
        else:
            await asyncio.to_thread(staged.write_bytes, source)
        return staged

    async def drop(self, staged: Path) -> None:
        """Removes a staged file."""
        await asyncio.to_thread(staged.unlink, missing_ok=True)

    async def add(self, push: KeptPush) -> None:
        """Keeps a push that is in force now."""
        before = self._pushes
        is_next = push.update_format is UpdateFormat.DELTA and (not before or self.newest == push.base)
        kept = (*before, push) if is_next else (push,)
        if sum(one.size for one in kept) > self._max_bytes or (
            not is_next and push.update_format is UpdateFormat.DELTA
        ):
            _log.warning("pushes are not kept for engines that come later", policy_version=push.version)
            kept = ()
        self._pushes = kept
        for one in {*before, push} - set(kept):
            if one.file is not None:
                await self.drop(one.file)
