"""Prompts with images for vLLM, which expands placeholders by itself: it gets one for each image, and the image.

Its prompt must then be the one that was asked for (`check_expanded`): the tokens that a trainer has are the engine's.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image

from penstock_chassis.errors import FailedPrecondition, InvalidArgument, Violation
from penstock_chassis.validation import invalid
from penstock_codec.image_files import measure
from penstock_inference.domain.generation import Media, TokenIds


def prompt_with_images(ids: TokenIds, media: Sequence[Media]) -> dict[str, Any]:
    """vLLM's raw prompt: ids with one placeholder for each image, and decoded images. CPU work, and much memory.

    Raises InvalidArgument naming an image that cannot be decoded.
    """
    collapsed: list[int] = []
    at = 0
    for one in media:
        collapsed += ids[at : one.token_start].tolist()
        collapsed.append(one.placeholder_token_id)
        at = one.token_end
    collapsed += ids[at:].tolist()
    return {
        "prompt_token_ids": collapsed,
        "multi_modal_data": {"image": [_decoded(one, index) for index, one in enumerate(media)]},
        "multi_modal_uuids": {"image": [one.sha256.hex() for one in media]},
    }


def check_expanded(wanted: TokenIds, made: Sequence[int] | None) -> None:
    """Raises FailedPrecondition (MEDIA_MISMATCH) unless vLLM's prompt is the one that was asked for."""
    if made is not None and not np.array_equal(wanted, np.asarray(made, dtype=np.int32)):
        raise FailedPrecondition(
            f"the engine's prompt has {len(made)} tokens where {wanted.size} were asked for, or others: its image"
            " preprocessor differs from the one by which the images were placed",
            reason="MEDIA_MISMATCH",
        )


def _decoded(media: Media, index: int) -> Image.Image:
    """The image in RGB, its first frame, on white where it is transparent; its orientation tag is not applied."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of odd metadata
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(io.BytesIO(media.data), formats=("PNG", "JPEG", "GIF", "WEBP")) as image:
                size = measure(media.data)
                if size is None or image.size != (size.width, size.height):
                    raise ValueError("its decoder finds another size than its header has")  # and took more memory
                image.load()
                if image.mode == "RGB":
                    return image.copy()
                shown = image.convert("RGBA")
                white = Image.new("RGBA", shown.size, "white")
                return Image.alpha_composite(white, shown).convert("RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise _undecodable(index, error) from error


def _undecodable(index: int, error: Exception) -> InvalidArgument:
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    return invalid([Violation(f"media[{index}].data", f"the image cannot be decoded: {text}")])
