"""Images of prompts: their bounds, and how many tokens of a model's prompt stand for one.

A template writes one placeholder for an image; `expanded` repeats it for each position that takes an embedding, as the
model's own preprocessor does. `ImageRule` knows two of these: the size decides (Qwen's vision models from 2 to 3), or
all images have one size (LLaVA).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from penstock_codec.chat import ImagePart
from penstock_codec.errors import CodecError
from penstock_codec.fast_dataclass import quick
from penstock_codec.image_files import Measured, measure

IntArray = NDArray[np.int32]

MAX_BYTES: Final = 16 << 20
"""The most bytes of an image's file."""
MAX_PIXELS: Final = 1 << 25
"""The most pixels of an image: width times height."""
MAX_TOTAL_PIXELS: Final = 1 << 28
"""The most pixels of all images of a prompt: an engine decodes them at one time, to 3 bytes each."""
MAX_IMAGES: Final = 256
"""The most images of one prompt."""
RULE_FILE: Final = "image_rule.json"
"""A file of ours beside a tokenizer's: an `ImageRule`, for those who have the tokenizer but not the model."""

_MOST_NUMBER: Final = 1 << 31
_LONGEST_SIDES: Final = 200
"""The preprocessor refuses an image of which one side is more than this many times the other."""
_GRID_MODELS: Final = frozenset({"qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"})
_FIXED_MODELS: Final = frozenset({"llava"})


@quick
@dataclass(frozen=True, slots=True)
class Placed:
    """An image of some tokens: tokens [start, start + count) stand for it. `grid` as in chat.v1.Media."""

    image: ImagePart
    start: int
    count: int
    grid: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ImageRule:
    """How many tokens stand for an image, and which. With `fixed`, it is that many; else the size decides.

    An image is resized so that both sides are multiples of patch * merge, and its pixels are in [min_pixels,
    max_pixels]; each square of this size is a token.
    """

    placeholder_id: int
    fixed: int = 0
    patch: int = 1
    merge: int = 1
    min_pixels: int = 1
    max_pixels: int = 1

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            least = 0 if field.name in ("placeholder_id", "fixed") else 1
            if type(value) is not int or not least <= value < _MOST_NUMBER:
                raise CodecError("FILES_INCOMPLETE", f"the model's image preprocessor has {field.name} {value!r}")
        if not self.fixed and self.max_pixels < (self.patch * self.merge) ** 2:
            raise CodecError("FILES_INCOMPLETE", "the model's image preprocessor has max_pixels below one token")

    @classmethod
    def of_model(cls, config: Mapping[str, Any], preprocessor: Mapping[str, Any]) -> ImageRule | None:
        """Reads a model's config.json and preprocessor_config.json; None for a model of another kind, or of text.

        Raises CodecError FILES_INCOMPLETE.
        """
        kind = config.get("model_type")
        if kind in _GRID_MODELS and preprocessor:
            size = preprocessor.get("size")
            known = size if isinstance(size, Mapping) else {}
            least = preprocessor.get("min_pixels") or known.get("shortest_edge") or 56 * 56
            most = preprocessor.get("max_pixels") or known.get("longest_edge") or 28 * 28 * 1280
            patch, merge = preprocessor.get("patch_size", 14), preprocessor.get("merge_size", 2)
            return cls(config.get("image_token_id", -1), 0, patch, merge, least, most)
        if kind in _FIXED_MODELS:
            vision = config.get("vision_config")
            vision = vision if isinstance(vision, Mapping) else {}
            side, patch = vision.get("image_size", 336), vision.get("patch_size", 14)
            if type(side) is not int or type(patch) is not int or not 0 < patch <= side:
                raise CodecError(
                    "FILES_INCOMPLETE", "config.json has a vision_config without image_size and patch_size"
                )
            count = (side // patch) ** 2
            # Its encoder has a token for the whole image, which the default leaves out.
            whole = vision.get("model_type", "clip_vision_model") == "clip_vision_model"
            if config.get("vision_feature_select_strategy", "default") == "default":
                count -= not whole
            else:
                count += whole
            return cls(config.get("image_token_index", config.get("image_token_id", -1)), count)
        return None

    @classmethod
    def from_json(cls, data: bytes) -> ImageRule:
        """Reads what `to_json` wrote. Raises CodecError FILES_INCOMPLETE."""
        try:
            return cls(**json.loads(data))
        except (ValueError, TypeError, RecursionError) as error:
            if isinstance(error, CodecError):
                raise
            raise CodecError("FILES_INCOMPLETE", f"{RULE_FILE} cannot be read: {error}") from error

    def to_json(self) -> bytes:
        """Writes the rule; equal rules give the same bytes."""
        return json.dumps(asdict(self), sort_keys=True).encode()

    @property
    def sha256(self) -> bytes:
        """SHA-256 of `to_json`: identifies the rule."""
        return hashlib.sha256(self.to_json()).digest()

    def tokens(self, width: int, height: int) -> tuple[int, tuple[int, ...]]:
        """Returns how many tokens an image of this size takes, and its grid. Raises CodecError IMAGE_INVALID."""
        if self.fixed:
            return self.fixed, ()
        if max(width, height) > _LONGEST_SIDES * min(width, height):
            raise CodecError(
                "IMAGE_INVALID",
                f"an image of {width} x {height} pixels: one side may be at most {_LONGEST_SIDES} times the other",
            )
        side = self.patch * self.merge
        rows, columns = round(height / side) * side, round(width / side) * side
        if rows * columns > self.max_pixels:
            shrink = math.sqrt(height * width / self.max_pixels)
            rows = max(side, math.floor(height / shrink / side) * side)
            columns = max(side, math.floor(width / shrink / side) * side)
        elif rows * columns < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (height * width))
            rows, columns = math.ceil(height * grow / side) * side, math.ceil(width * grow / side) * side
        grid = (1, rows // self.patch, columns // self.patch)
        return grid[1] * grid[2] // self.merge**2, grid


def expanded(ids: IntArray, images: Sequence[ImagePart], rule: ImageRule) -> tuple[IntArray, tuple[Placed, ...]]:
    """Repeats each placeholder of a prompt for the tokens of its image; returns the ids and where the images are.

    Raises CodecError: IMAGE_UNSUPPORTED (the template shows another number of images), IMAGE_INVALID, IMAGE_REMOTE,
    IMAGE_LIMIT.
    """
    found = np.flatnonzero(ids == rule.placeholder_id)
    if found.size != len(images):
        raise CodecError(
            "IMAGE_UNSUPPORTED",
            f"the prompt has {found.size} placeholders for {len(images)} images: the chat template does not show "
            "images there, or a text spells a placeholder",
        )
    if not images:
        return ids, ()
    if len(images) > MAX_IMAGES:
        raise CodecError("IMAGE_LIMIT", f"the conversation has {len(images)} images; {MAX_IMAGES} are allowed")
    repeats = np.ones(ids.size, dtype=np.int64)
    placed: list[Placed] = []
    grown = pixels = 0
    for at, image in zip(found.tolist(), images, strict=True):
        size = measured(image)
        count, grid = rule.tokens(size.width, size.height)
        repeats[at] = count
        placed.append(Placed(image, at + grown, count, grid))
        grown += count - 1
        pixels += size.width * size.height
    if pixels > MAX_TOTAL_PIXELS:
        raise CodecError("IMAGE_LIMIT", f"the images have {pixels} pixels; {MAX_TOTAL_PIXELS} are allowed")
    return np.repeat(ids, repeats), tuple(placed)


def measured(image: ImagePart) -> Measured:
    """Returns an inline image's kind and size, measured unless it was. Raises CodecError.

    IMAGE_REMOTE, IMAGE_INVALID, IMAGE_LIMIT.
    """
    if not image.data:
        raise CodecError("IMAGE_REMOTE", "images by address are not fetched: send the image's bytes, as a data URL")
    if len(image.data) > MAX_BYTES:
        raise CodecError("IMAGE_LIMIT", f"an image has {len(image.data)} bytes; {MAX_BYTES} are allowed")
    found = measure(image.data) if image.size is None else Measured(image.media_type, *image.size)
    if found is None:
        raise CodecError("IMAGE_INVALID", "an image is no PNG, JPEG, GIF or WebP file, or its header is damaged")
    if found.width * found.height > MAX_PIXELS:
        raise CodecError("IMAGE_LIMIT", f"an image has {found.width} x {found.height} pixels; {MAX_PIXELS} are allowed")
    return found
