"""Tensors of a safetensors file as numpy arrays, bfloat16 included, whoever sent it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, deserialize

from penstock_chassis.errors import InvalidArgument, Violation

_DTYPES: Mapping[str, type[np.generic]] = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": np.uint16}


def parse_safetensors(data: bytes) -> dict[str, NDArray[Any]]:
    """Tensors of a safetensors file by name: float64, float32 and float16 as they are, bfloat16 widened to float32.

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
