"""Images in agents' requests: reads data URLs and base64, and refuses what is too large before anything is kept."""

from __future__ import annotations

import base64
import binascii
from typing import Final

from penstock_codec.chat import ImagePart
from penstock_codec.image_files import measure
from penstock_codec.images import MAX_BYTES, MAX_IMAGES, MAX_PIXELS
from penstock_interception.domain.requests import ChatRequest
from penstock_interception.ingress.dialects.base import BadRequest

_STANDARD: Final = str.maketrans("-_", "+/")


def image_at(url: str, path: str, media_type: str = "") -> ImagePart:
    """Reads a data URL; any other address stays one, which nobody here fetches. `path` is the field's.

    Raises BadRequest.
    """
    if url[:5].lower() != "data:":
        return ImagePart(url, media_type)
    head, comma, data = url[5:].partition(",")
    kind, *parameters = head.split(";")
    if not comma or "base64" not in [parameter.strip().lower() for parameter in parameters]:
        raise BadRequest(f"{path}: a data URL of an image must be base64.", path, "invalid_value")
    return inline_image(data, kind or media_type, path)


def inline_image(data: str, media_type: str, path: str) -> ImagePart:
    """Reads an image in base64, standard or URL-safe, padded or not. Raises BadRequest."""
    if len(data) // 4 * 3 > MAX_BYTES + 2:
        raise _too_large(f"{path}: the image has more than {MAX_BYTES} bytes.", path)
    if not data.isascii():  # which `translate` would go through letter by letter
        raise BadRequest(f"{path}: not base64.", path, "invalid_value")
    text = data.rstrip("=").translate(_STANDARD)
    try:
        raw = base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
    except (binascii.Error, ValueError):
        raise BadRequest(f"{path}: not base64.", path, "invalid_value") from None
    if not raw:
        raise BadRequest(f"{path}: the image is empty.", path, "invalid_value")
    if len(raw) > MAX_BYTES:
        raise _too_large(f"{path}: the image has {len(raw)} bytes; {MAX_BYTES} are allowed.", path)
    size = measure(raw)
    if size is None:
        return ImagePart.inline(raw, media_type.lower())
    if size.width * size.height > MAX_PIXELS:
        raise _too_large(f"{path}: the image has {size.width} x {size.height} pixels; {MAX_PIXELS} are allowed.", path)
    return ImagePart.inline(raw, size.media_type, (size.width, size.height))


def images_within_limit(request: ChatRequest) -> list[ImagePart]:
    """Returns all images of a request. Raises BadRequest if there are too many."""
    found: list[ImagePart] = []
    for message in request.messages:
        found += message.images
    if len(found) > MAX_IMAGES:
        raise _too_large(f"The conversation has {len(found)} images; {MAX_IMAGES} are allowed.", "messages")
    return found


def _too_large(message: str, path: str) -> BadRequest:
    return BadRequest(message, path, "image_limit")
