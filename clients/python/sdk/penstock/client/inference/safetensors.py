"""Tensors as one safetensors file, streamed: a JSON header, then the tensors' bytes back to back.

Format: https://github.com/huggingface/safetensors (8 bytes little-endian length of the header, the header padded with
spaces to a multiple of 8, the data). Implemented here to send a trainer's weights without a second copy and without
another dependency.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Final

import numpy as np
import orjson
from numpy.typing import NDArray

from penstock.client.errors import InvalidArgument

CHUNK_BYTES: Final = 1024 * 1024
"""Bytes of one chunk of a push, the protocol's maximum."""

_DTYPES: Final = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}


@dataclass(frozen=True, slots=True)
class TensorFile:
    """A safetensors file in memory: its header and its tensors.

    Attributes:
        size_bytes: of the whole file.
        sha256: digest of the whole file.
    """

    header: bytes
    tensors: tuple[NDArray[Any], ...]
    size_bytes: int
    sha256: bytes

    @classmethod
    def of(cls, tensors: Mapping[str, NDArray[Any]]) -> "TensorFile":
        """Lays tensors out; hashes all bytes once, so call it off the event loop when they are many.

        Raises:
            InvalidArgument: there is none, or one has a dtype that the format does not support.
        """
        if not tensors:
            raise InvalidArgument("There are no tensors to push", reason="NO_TENSORS")
        entries: dict[str, Any] = {}
        laid_out = []
        offset = 0
        for name, tensor in tensors.items():
            array = _little_endian(np.ascontiguousarray(tensor).reshape(np.shape(tensor)))
            if array.dtype.name not in _DTYPES:
                raise InvalidArgument(f"{name} has dtype {array.dtype}, which cannot be pushed", reason="TENSOR_DTYPE")
            entries[name] = {
                "dtype": _DTYPES[array.dtype.name],
                "shape": list(array.shape),
                "data_offsets": [offset, offset + array.nbytes],
            }
            offset += array.nbytes
            laid_out.append(array)
        text = orjson.dumps(entries)
        text += b" " * (-len(text) % 8)
        header = len(text).to_bytes(8, "little") + text
        digest = sha256(header)
        for array in laid_out:
            digest.update(_bytes(array))
        return cls(header, tuple(laid_out), len(header) + offset, digest.digest())

    def chunks(self) -> Iterator[bytes]:
        """Yields the file in chunks of `CHUNK_BYTES`; the last one may be shorter."""
        buffer = bytearray()
        for piece in (memoryview(self.header), *map(_bytes, self.tensors)):
            start = 0
            while start < len(piece):
                end = min(len(piece), start + CHUNK_BYTES - len(buffer))
                buffer += piece[start:end]
                start = end
                if len(buffer) == CHUNK_BYTES:
                    yield bytes(buffer)
                    buffer.clear()
        if buffer:
            yield bytes(buffer)


def _little_endian(array: NDArray[Any]) -> NDArray[Any]:
    return array.astype(array.dtype.newbyteorder("<")) if array.dtype.byteorder == ">" else array


def _bytes(array: NDArray[Any]) -> memoryview:
    return memoryview(array.reshape(-1).view(np.uint8).data) if array.size else memoryview(b"")
