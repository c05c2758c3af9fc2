"""Distinguishes one model from another where names do not, so that no evaluation shows the results of another model."""

from collections.abc import Sequence
from dataclasses import replace
from hashlib import file_digest, sha256
from pathlib import Path
from typing import Final

from penstock.client.tasks.spec import RolloutModel, Upstream
from penstock.client.wire import specs
from penstock.client.wire.fingerprints import fingerprint
from penstock.driver.v1 import rollout_pb2

_READ_BYTES: Final = 64 << 20
"""Maximum bytes of a directory that are read: files beyond it are known by their size and time."""


def files_digest(folder: Path) -> str:
    """Returns a hash of a model directory's files: small ones by content, others by size and time of change.

    Hidden files and directories below it are not of the model.

    Raises:
        OSError: the directory or a file cannot be read.
    """
    found = sha256()
    left = _READ_BYTES
    for file in sorted(item for item in folder.iterdir() if not item.name.startswith(".") and item.is_file()):
        facts = file.stat()
        if facts.st_size <= left:
            left -= facts.st_size
            with file.open("rb") as content:
                mark = file_digest(content, "sha256").hexdigest()
        else:
            mark = f"{facts.st_size} {facts.st_mtime_ns}"
        found.update(f"{file.name}\0{mark}\0".encode(errors="surrogateescape"))
    return found.hexdigest()


def models_digest(models: Sequence[RolloutModel]) -> str:
    """Returns a hash of a task's models without their keys; empty = there are none."""
    if not models:
        return ""
    keyless = (
        replace(model, source=replace(model.source, api_key="")) if isinstance(model.source, Upstream) else model
        for model in models
    )
    return sha256(fingerprint(rollout_pb2.RolloutSpec(models=[specs.model(model) for model in keyless]))).hexdigest()
