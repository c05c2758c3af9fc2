"""Images of a prompt: reads and checks them, before anything of the request starts."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np

from penstock.chat.v1 import chat_pb2
from penstock_chassis.errors import Unsupported, Violation
from penstock_chassis.validation import invalid
from penstock_codec import Codec
from penstock_codec.image_files import measure
from penstock_codec.images import MAX_BYTES, MAX_IMAGES, MAX_PIXELS, MAX_TOTAL_PIXELS, Placed
from penstock_inference.domain.engine_info import EngineInfo
from penstock_inference.domain.generation import IMAGE, Media, TokenIds

MAX_TOTAL_BYTES: Final = 32 << 20
"""The most bytes of all images of a prompt."""


def media_from(messages: Sequence[chat_pb2.Media], prompt: TokenIds, info: EngineInfo) -> tuple[Media, ...]:
    """The images of a prompt of token ids. CPU work: a digest of each.

    Raises Unsupported (MEDIA_UNSUPPORTED), InvalidArgument naming every field at fault.
    """
    if not messages:
        return ()
    for message in messages:
        _check_modality(message.modality, info)
    if len(messages) > MAX_IMAGES or sum(len(message.data) for message in messages) > MAX_TOTAL_BYTES:
        raise invalid(
            [Violation("media", f"at most {MAX_IMAGES} images with {MAX_TOTAL_BYTES} bytes together are allowed")]
        )
    found: list[Violation] = []
    after = 0
    for index, message in enumerate(messages):
        problem = _problem_of(message, prompt, after)
        if problem is not None:
            found.append(Violation(f"media[{index}].{problem[0]}", problem[1]))
        after = message.token_start + message.token_count
    if found:
        raise invalid(found)
    sizes = (measure(message.data) for message in messages)
    if sum(size.width * size.height for size in sizes if size is not None) > MAX_TOTAL_PIXELS:
        raise invalid([Violation("media", f"at most {MAX_TOTAL_PIXELS} pixels together are allowed")])
    return tuple(
        Media(
            message.media_type,
            message.sha256,
            message.data,
            message.token_start,
            message.token_count,
            message.placeholder_token_id,
        )
        for message in messages
    )


def media_of(images: Iterable[Placed], codec: Codec | None, info: EngineInfo) -> tuple[Media, ...]:
    """The images of a prompt that was rendered here. Raises Unsupported (MEDIA_UNSUPPORTED)."""
    if codec is None or (rule := codec.images) is None:
        return ()
    made: list[Media] = []
    for one in images:
        _check_modality(IMAGE, info)
        image = one.image
        made.append(Media(image.media_type, image.sha256, image.data, one.start, one.count, rule.placeholder_id))
    return tuple(made)


def _check_modality(modality: str, info: EngineInfo) -> None:
    if modality not in info.capabilities.modalities:
        raise Unsupported(
            f"the {info.engine} engine takes no prompt with the modality {modality[:32]!r} with this model",
            reason="MEDIA_UNSUPPORTED",
            metadata={"modality": modality[:32]},
        )


def _problem_of(message: chat_pb2.Media, prompt: TokenIds, after: int) -> tuple[str, str] | None:
    """What is wrong with an image: the field, and why; None if nothing is."""
    start, end = message.token_start, message.token_start + message.token_count
    if start < after:
        return "token_start", f"its tokens begin before those of the image before it end, at {after}"
    if not message.token_count or end > prompt.size:
        return "token_count", f"must be 1 to {prompt.size - start}, the tokens from there on"
    if not np.any(prompt[start:end] == message.placeholder_token_id):
        return "placeholder_token_id", "none of its tokens is this one"
    if not message.data or len(message.data) > MAX_BYTES:
        return "data", f"1 to {MAX_BYTES} bytes"
    if hashlib.sha256(message.data).digest() != message.sha256:
        return "sha256", "is not the SHA-256 of data"
    size = measure(message.data)
    if size is None:
        return "data", "is no PNG, JPEG, GIF or WebP file, or its header is damaged"
    if size.width * size.height > MAX_PIXELS:
        return "data", f"{size.width} x {size.height} pixels; {MAX_PIXELS} are allowed"
    return None
