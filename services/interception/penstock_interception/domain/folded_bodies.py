"""Bodies of requests without the text of their images, which an agent repeats with each call."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from penstock_codec.chat import ImagePart
from penstock_codec.fast_dataclass import quick

# A run is tried at its start alone: it has as many places as characters.
_BASE64: Final = re.compile(rb"(?<![A-Za-z0-9+/])[A-Za-z0-9+/]{64,}={0,2}")


@quick
@dataclass(frozen=True, slots=True)
class FoldedBody:
    """A request's body without the text of its images, which are stored once for the whole rollout.

    `cuts` are where the text of an image was, in bytes of `body`, in ascending order, with its digest; `images` has the
    media type and the bytes of each.
    """

    body: bytes
    cuts: tuple[tuple[int, bytes], ...]
    images: Mapping[bytes, tuple[str, bytes]]


def fold(body: bytes, images: Iterable[ImagePart]) -> FoldedBody | None:
    """Takes the text of these images out of a body, as far as it is plain base64; None without images. CPU work.

    `images` has one as often as the body shows it. A body of which they are less than half stays whole: little is
    gained, and its other text would be searched for nothing.
    """
    shown = [image for image in images if image.data]
    if not shown:
        return None
    kept = {image.sha256: (image.media_type, image.data) for image in shown}
    if 2 * sum(-(-len(image.data) // 3) * 4 for image in shown) < len(body):
        return FoldedBody(body, (), kept)
    digests = {base64.b64encode(data): digest for digest, (_, data) in kept.items()}
    pieces: list[bytes] = []
    cuts: list[tuple[int, bytes]] = []
    start = length = 0
    for run in _BASE64.finditer(body):
        digest = digests.get(run.group())
        if digest is None:
            continue
        pieces.append(body[start : run.start()])
        length += run.start() - start
        cuts.append((length, digest))
        start = run.end()
    pieces.append(body[start:])
    return FoldedBody(b"".join(pieces), tuple(cuts), kept)


def unfold(body: bytes, cuts: Iterable[tuple[int, bytes]], data: Mapping[bytes, bytes]) -> bytes:
    """Puts a body together again; `data` has the bytes of each image by its digest."""
    pieces: list[bytes] = []
    start = 0
    for at, digest in cuts:
        pieces += (body[start:at], base64.b64encode(data[digest]))
        start = at
    return b"".join([*pieces, body[start:]])
