"""Receiving new weights: begin, chunks of one safetensors file (or a path in their place), commit with its digest.

All or nothing: whatever goes wrong, from a broken stream to a tensor that does not fit, the engine keeps weights and
version. The version and digest in force are a success when they are pushed again, so a trainer whose answer was lost
can simply repeat its push: once it is being put in force, that goes on to its end, whoever waits.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from penstock_chassis.errors import Unsupported
from penstock_inference.engines.base import Engine, PauseMode, UpdateFormat, UpdatePhases
from penstock_inference.engines.optional import WeightFiles
from penstock_inference.finishing import Finishing
from penstock_inference.metrics import UPDATE_SECONDS
from penstock_inference.safetensors_file import parse_safetensors
from penstock_inference.uploads import Commit, Uploads, frame_invalid, under


@dataclass(frozen=True, slots=True)
class UpdateBegin:
    """What is to come."""

    policy_version: int
    update_format: UpdateFormat
    mode: PauseMode = PauseMode.KEEP
    size_bytes: int | None = None
    sha256: bytes | None = None
    label: str = ""
    path: str = ""
    """Instead of chunks, under the operator's weights directory."""


UpdateFrame = UpdateBegin | bytes | Commit


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """The version in force, and the seconds that getting there took."""

    policy_version: int
    transfer_s: float = 0.0
    load_s: float = 0.0
    pause_s: float = 0.0


class WeightUpdates:
    """Takes pushes for one engine.

    Args:
        engine: where the weights go.
        uploads: the limits.
        weights_dir: where paths may lead; None takes none.
        spool_dir: where a push is written for an engine that wants it as a file.
    """

    def __init__(
        self, engine: Engine, uploads: Uploads, weights_dir: Path | None = None, spool_dir: Path | None = None
    ) -> None:
        self._engine = engine
        self._uploads = uploads
        self._weights_dir = weights_dir
        self._spool_dir = spool_dir
        self._in_force: tuple[int, bytes] | None = None
        self._committing: dict[int, asyncio.Event] = {}
        """By version; set when it is in force or refused."""
        self._finishing = Finishing()

    async def receive(self, frames: AsyncIterator[UpdateFrame]) -> UpdateResult:
        """Read one push to its end and put it in force.

        Raises InvalidArgument (UPDATE_FRAME_INVALID, PATH_REFUSED), FailedPrecondition (PATHS_OFF), Unsupported
        (CAPABILITY_MISSING), ResourceExhausted (UPDATE_TOO_LARGE), DataLoss (DIGEST_MISMATCH), DeadlineExceeded
        (UPDATE_STALLED), and what the engine raises.
        """
        if not self._engine.info().capabilities.weight_update:
            raise Unsupported("this engine's weights cannot be replaced", reason="CAPABILITY_MISSING")
        began = time.monotonic()
        begin = await self._uploads.next(frames)
        if not isinstance(begin, UpdateBegin):
            raise frame_invalid("the first message must be `begin`")
        if (over := self._committing.get(begin.policy_version)) is not None:
            # Whether this is a repetition shows when that is over.
            await over.wait()
        path = under(self._weights_dir, begin.path, "weights_dir", "begin.path") if begin.path else None
        known = begin.path.encode() if path is not None else begin.sha256
        if known is not None and self._in_force == (begin.policy_version, known):
            return UpdateResult(begin.policy_version)
        if begin.size_bytes is not None:
            self._uploads.check_size(begin.size_bytes)
        if path is None and self._in_force is not None and self._in_force[0] == begin.policy_version:
            # Whether it is a mere repetition shows only in the digest at the end.
            _, digest = await self._uploads.read(frames)
            if self._in_force == (begin.policy_version, digest):
                return UpdateResult(begin.policy_version, time.monotonic() - began)
        await self._engine.begin_update(begin.policy_version, begin.label, begin.update_format)
        try:
            if path is not None:
                await self._uploads.nothing(frames)
                identity, transferred = begin.path.encode(), time.monotonic()
                await self._push_path(path)
            else:
                identity, transferred = await self._push_chunks(frames)
            parsed = time.monotonic()
        except BaseException:
            await self._engine.abort_update()
            raise
        phases = await self._finishing.run(self._commit(begin, identity), "commit-update")
        result = UpdateResult(
            begin.policy_version, transferred - began, parsed - transferred + phases.load_s, phases.pause_s
        )
        for phase, took in (("transfer", result.transfer_s), ("load", result.load_s), ("pause", result.pause_s)):
            UPDATE_SECONDS.labels(phase).observe(took)
        return result

    async def aclose(self) -> None:
        """Wait for what is being put in force."""
        await self._finishing.aclose()

    async def _commit(self, begin: UpdateBegin, identity: bytes) -> UpdatePhases:
        over = self._committing[begin.policy_version] = asyncio.Event()
        try:
            phases = await self._engine.commit_update(begin.mode)
            self._in_force = (begin.policy_version, identity)
            return phases
        except BaseException:
            await self._engine.abort_update()
            raise
        finally:
            del self._committing[begin.policy_version]
            over.set()

    async def _push_chunks(self, frames: AsyncIterator[UpdateFrame]) -> tuple[bytes, float]:
        """The file's digest, and when all of it had come."""
        if not isinstance(self._engine, WeightFiles):
            data, digest = await self._uploads.read(frames)
            transferred = time.monotonic()
            await self._engine.push_tensors(await asyncio.to_thread(parse_safetensors, data))
            return digest, transferred
        with tempfile.TemporaryDirectory(prefix="push-", dir=self._spool_dir) as directory:
            file = Path(directory) / "incoming.safetensors"
            digest = await self._uploads.write(frames, file)
            transferred = time.monotonic()
            await self._engine.push_file(file)
        return digest, transferred

    async def _push_path(self, path: Path) -> None:
        if isinstance(self._engine, WeightFiles):
            await self._engine.push_path(path)
            return
        for file in sorted(path.glob("*.safetensors")) if path.is_dir() else [path]:
            data = await asyncio.to_thread(file.read_bytes)
            self._uploads.check_size(len(data))
            await self._engine.push_tensors(await asyncio.to_thread(parse_safetensors, data))
