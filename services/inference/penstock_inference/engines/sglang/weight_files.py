"""Lays the tensors of a checkpoint out as a directory that an inference server loads as a whole."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from penstock_inference.engines.checkpoint import Checkpoint, tensor_entries

_COPY_BYTES = 4 << 20


def lay_out(checkpoint: Checkpoint, directory: Path) -> Path:
    """A directory with exactly the checkpoint's tensors: one that there is already, or `directory`, which is made.

    Files of which every tensor is in force are linked; of others, the tensors in force are copied.
    """
    plan = {Path(file).resolve(): frozenset(names) for file, names in checkpoint.plan()}
    whole = {file: set(tensor_entries(file)) <= names for file, names in plan.items()}
    parents = {file.parent for file in plan}
    if len(parents) == 1 and all(whole.values()):
        there = parents.pop()
        # Beside `directory` other files will come and go.
        if there != directory.parent and {file.resolve() for file in there.glob("*.safetensors")} == plan.keys():
            return there
    directory.mkdir()
    for n, (file, names) in enumerate(sorted(plan.items()), 1):
        target = directory / f"model-{n:05}-of-{len(plan):05}.safetensors"
        if whole[file]:
            target.symlink_to(file)
        else:
            _copy(file, names, target)
    return directory


def _copy(source: Path, names: frozenset[str], target: Path) -> None:
    """Copy some tensors of a file to a new one, in pieces."""
    entries = {name: entry for name, entry in tensor_entries(source).items() if name in names}
    header: dict[str, Mapping[str, object]] = {}
    end = 0
    for name, entry in entries.items():
        offsets = [end, end + entry.size]
        header[name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": offsets}
        end += entry.size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with source.open("rb") as old, target.open("wb") as new:
        new.write(len(text).to_bytes(8, "little") + text)
        for entry in entries.values():
            old.seek(entry.start)
            left = entry.size
            while left and (piece := old.read(min(left, _COPY_BYTES))):
                new.write(piece)
                left -= len(piece)
