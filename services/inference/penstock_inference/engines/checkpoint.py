"""Tracks the file of each tensor of the weights in force, and checks pushes that replace them.

The weights stay in files: first those of the model directory, then pushed ones. A partial push replaces some tensors,
but loading always covers the whole model: vLLM fuses and repacks tensors, and is reliable only with all of a layer.
Names, shapes and finiteness are checked before a running engine is involved.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import structlog
from numpy.typing import NDArray
from safetensors import SafetensorError, deserialize, safe_open

from penstock_chassis.errors import FailedPrecondition, InvalidArgument, Violation
from penstock_inference.domain.weights import UpdateFormat

_DTYPES: Mapping[str, type[np.generic]] = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": np.uint16}

Shape = tuple[int, ...]

_log = structlog.get_logger("penstock.inference")

# A float is not finite when all bits of its exponent are set.
_EXPONENTS: Mapping[str, tuple[str, int]] = {
    "F64": ("<u8", 0x7FF0_0000_0000_0000),
    "F32": ("<u4", 0x7F80_0000),
    "F16": ("<u2", 0x7C00),
    "BF16": ("<u2", 0x7F80),
}
_CHECK_AT_ONCE = 4 << 20


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The weights in force.

    `shapes` are the model's tensors by published name, `sources` the file of each. Without `shapes` (no safetensors in
    the model directory) nothing can be pushed.
    """

    shapes: Mapping[str, Shape]
    sources: Mapping[str, Path]
    tied: bool

    @classmethod
    def read(cls, model_dir: Path) -> Checkpoint:
        """Read a model directory. Raises FailedPrecondition (MODEL_UNREADABLE)."""
        try:
            tied = bool(json.loads((model_dir / "config.json").read_text("utf-8")).get("tie_word_embeddings"))
            headers = {path: tensor_entries(path) for path in sorted(model_dir.glob("*.safetensors"))}
        except (OSError, ValueError, InvalidArgument) as error:
            raise FailedPrecondition(f"cannot read the model: {error}", reason="MODEL_UNREADABLE") from error
        shapes = {name: tensor.shape for tensors in headers.values() for name, tensor in tensors.items()}
        return cls(shapes, {name: path for path, tensors in headers.items() for name in tensors}, tied)

    @property
    def parameter_count(self) -> int:
        """Number of values in all tensors."""
        return sum(math.prod(shape) for shape in self.shapes.values())

    def updated(self, files: Iterable[Path], update_format: UpdateFormat) -> Checkpoint:
        """The checkpoint with the tensors of these files, each of which is read completely.

        Raises FailedPrecondition (TENSOR_MISSING, TENSOR_UNKNOWN, TENSOR_SHAPE) or InvalidArgument (WEIGHTS_INVALID,
        TENSOR_NOT_FINITE), naming every tensor at fault.
        """
        found: dict[str, Path] = {}
        unknown, misshapen, infinite = [], [], []
        for path in files:
            for name, tensor in tensor_entries(path).items():
                if name not in self.shapes:
                    if not (name == "lm_head.weight" and self.tied) and not name.endswith("rotary_emb.inv_freq"):
                        unknown.append(Violation(name, "is not a tensor of this model"))
                elif tensor.shape != self.shapes[name]:
                    text = f"has shape {tensor.shape}, the model's is {self.shapes[name]}"
                    misshapen.append(Violation(name, text))
                elif not _finite(path, tensor):
                    infinite.append(Violation(name, "has a value that is not finite"))
                else:
                    found[name] = path
        absent = self.shapes.keys() - found.keys() if update_format is UpdateFormat.FULL else set()
        missing = [Violation(name, "is missing") for name in sorted(absent)] if not (misshapen or infinite) else []
        for kind, reason, violations in (
            (FailedPrecondition, "TENSOR_SHAPE", misshapen),
            (InvalidArgument, "TENSOR_NOT_FINITE", infinite),
            (FailedPrecondition, "TENSOR_MISSING", missing),
            (FailedPrecondition, "TENSOR_UNKNOWN", unknown),
        ):
            if violations:
                first = f"{violations[0].field} {violations[0].description}"
                raise kind(f"the weights do not fit the model: {first}", reason=reason, violations=violations)
        return Checkpoint(self.shapes, {**self.sources, **found}, self.tied)

    def plan(self) -> list[list[Any]]:
        """The files and tensors for the workers to load: `[file, [names]]`, in a form that crosses process borders."""
        by_file: dict[Path, list[str]] = {}
        for name, path in self.sources.items():
            by_file.setdefault(path, []).append(name)
        return [[str(path), sorted(names)] for path, names in sorted(by_file.items())]


class Spool:
    """A directory of pushed files; files that no tensor needs are removed."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._count = 0

    def new(self) -> Path:
        """The path of a new file."""
        self._count += 1
        return self._directory / f"push-{self._count}.safetensors"

    def take(self, path: Path) -> Path:
        """Move a file in."""
        target = self.new()
        shutil.move(path, target)
        return target

    def keep_only(self, paths: Iterable[Path]) -> None:
        """Remove all other files; one that cannot be removed stays until the next time."""
        kept = set(paths)
        for path in self._directory.glob("push-*.safetensors"):
            if path not in kept:
                try:
                    path.unlink(missing_ok=True)
                except OSError as error:
                    # The weights in force do not depend on this, so the caller must not get an error.
                    _log.warning("a file of replaced weights could not be removed", path=str(path), error=repr(error))


def files_of(path: Path) -> list[Path]:
    """The safetensors files at a path: itself, or those of a directory. Raises InvalidArgument when there are none."""
    found = sorted(path.glob("*.safetensors")) if path.is_dir() else [path] if path.is_file() else []
    if not found:
        raise InvalidArgument(
            f"there is no safetensors file at {path.name}",
            reason="WEIGHTS_INVALID",
            violations=[Violation("path", "is neither a safetensors file nor a directory of them")],
        )
    return found


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where a tensor is in a safetensors file."""

    dtype: str
    shape: Shape
    start: int
    """Offset in the file, in bytes."""
    size: int


def tensor_entries(path: Path) -> dict[str, TensorEntry]:
    """Every tensor of a safetensors file, by name. Raises InvalidArgument (WEIGHTS_INVALID) when it is none."""
    try:
        # The library's reader checks the format: offsets, sizes, overlaps.
        with safe_open(path, framework="np"):
            pass
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            entries = json.loads(file.read(length))
    except (OSError, SafetensorError, ValueError) as error:
        raise InvalidArgument(f"not a safetensors file: {error}", reason="WEIGHTS_INVALID") from error
    entries.pop("__metadata__", None)
    tensors = {}
    for name, entry in entries.items():
        start, end = entry["data_offsets"]
        tensors[name] = TensorEntry(entry["dtype"], tuple(entry["shape"]), 8 + length + start, end - start)
    return tensors


def _finite(path: Path, tensor: TensorEntry) -> bool:
    if tensor.dtype not in _EXPONENTS or not tensor.size:
        return True
    dtype, mask = _EXPONENTS[tensor.dtype]
    numbers = np.memmap(path, dtype, "r", tensor.start, (tensor.size // np.dtype(dtype).itemsize,))
    return not any(
        bool(((numbers[at : at + _CHECK_AT_ONCE] & mask) == mask).any())
        for at in range(0, numbers.size, _CHECK_AT_ONCE)
    )


def parse_safetensors(data: bytes) -> dict[str, NDArray[Any]]:
    """Tensors by name: float64, float32 and float16 unchanged, bfloat16 widened to float32.

    Raises InvalidArgument for a malformed file or another dtype.
    """
    try:
        entries: list[tuple[str, dict[str, Any]]] = deserialize(data)  # type: ignore[no-untyped-call]
    except (SafetensorError, ValueError) as error:
        raise InvalidArgument(f"not a safetensors file: {error}", reason="WEIGHTS_INVALID") from error
    tensors: dict[str, NDArray[Any]] = {}
    for name, entry in entries:
        dtype = _DTYPES.get(entry["dtype"])
        if dtype is None:
            raise InvalidArgument(
                f"tensor {name} has dtype {entry['dtype']}; F64, F32, F16 and BF16 are read",
                reason="WEIGHTS_INVALID",
                violations=[Violation(name, f"dtype {entry['dtype']}")],
            )
        array = np.frombuffer(entry["data"], dtype=dtype).reshape(entry["shape"])
        # A bfloat16 is the upper half of a float32.
        tensors[name] = (array.astype(np.uint32) << 16).view(np.float32) if entry["dtype"] == "BF16" else array
    return tensors
