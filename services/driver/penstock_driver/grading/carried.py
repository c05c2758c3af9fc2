"""Keeps an agent's work in a file from the deletion of its sandbox until it is graded: its changes and its artifacts.

A driver process that is killed meanwhile leaves the file, and the next one grades from it.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import os
import shutil
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final, TypeAlias

from google.protobuf.message import DecodeError

from penstock.driver.v1 import rollout_pb2
from penstock_driver.domain.rollout import ArtifactCollected, Changes, Failure
from penstock_driver.wire.outcomes import artifact_from_proto, changes_from_proto, failure_from_proto
from penstock_driver.wire.to_proto import artifact_to_proto, changes_to_proto, failure_to_proto

Fetched: TypeAlias = ArtifactCollected | Failure
_SUFFIX: Final = ".carried"
_SMALL_BYTES: Final = 64 << 10
"""A layer of at most so many bytes is copied on the event loop, in a fraction of a millisecond."""


@dataclass(frozen=True, slots=True)
class Work:
    """An agent's work. `layer` is read from its current position; close it."""

    changes: Changes
    artifacts: Sequence[Fetched]
    layer: BinaryIO


class CarriedWork:
    """The file of one rollout in `directory`."""

    def __init__(self, directory: Path, rollout_id: str) -> None:
        self._path = directory / f"{file_stem(rollout_id)}{_SUFFIX}"

    async def write(self, work: Work, size: int) -> None:
        """Write the file, whose layer has `size` bytes. OSError if the disk refuses."""
        if size <= _SMALL_BYTES:
            self._write(work)
        else:
            await asyncio.to_thread(self._write, work)

    def _write(self, work: Work) -> None:
        head = json.dumps(
            {
                "changes": _text(changes_to_proto(work.changes)),
                "artifacts": [_artifact(item) for item in work.artifacts],
            }
        )
        self._path.parent.mkdir(mode=0o700, exist_ok=True)
        temporary = self._path.with_suffix(".new")
        try:
            with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                file.write(head.encode() + b"\n")
                shutil.copyfileobj(work.layer, file)
            temporary.replace(self._path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise

    def read(self) -> Work:
        """The work in the file. FileNotFoundError, and ValueError for what is no such file."""
        file = self._path.open("rb")
        try:
            head = json.loads(file.readline())
            return Work(
                changes_from_proto(rollout_pb2.Grading.Changes.FromString(base64.b64decode(head["changes"]))),
                [_read_artifact(item) for item in head["artifacts"]],
                file,
            )
        except (KeyError, TypeError, AttributeError, DecodeError) as error:
            file.close()
            raise ValueError("the agent's work cannot be read") from error
        except BaseException:
            file.close()
            raise

    async def remove(self) -> None:
        """Remove the file; idempotent. A removal waits for the disk, where the journal is written too: in a thread."""
        with suppress(OSError):  # the next start removes it
            await asyncio.to_thread(self._path.unlink, missing_ok=True)


def remove_others(directory: Path, rollout_ids: Collection[str]) -> None:
    """Remove the files of all rollouts but these, whose names begin with `file_stem`."""
    kept = {file_stem(rollout_id) for rollout_id in rollout_ids}
    if directory.is_dir():
        for path in directory.iterdir():
            if path.name.partition(".")[0] not in kept:
                path.unlink(missing_ok=True)


def file_stem(rollout_id: str) -> str:
    """The beginning of the name of a rollout's file: an id that a client chose may be no file name."""
    return hashlib.sha256(rollout_id.encode()).hexdigest()[:32]


def _text(message: rollout_pb2.Grading.Changes | rollout_pb2.ArtifactCollected | rollout_pb2.Failure) -> str:
    return base64.b64encode(message.SerializeToString()).decode()


def _artifact(item: Fetched) -> dict[str, str]:
    if isinstance(item, Failure):
        return {"failure": _text(failure_to_proto(item))}
    return {"artifact": _text(artifact_to_proto(item))}


def _read_artifact(data: dict[str, str]) -> Fetched:
    if "failure" in data:
        return failure_from_proto(rollout_pb2.Failure.FromString(base64.b64decode(data["failure"])))
    return artifact_from_proto(rollout_pb2.ArtifactCollected.FromString(base64.b64decode(data["artifact"])))
