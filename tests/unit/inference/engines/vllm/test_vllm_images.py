"""Images for vLLM: what is decoded."""

from __future__ import annotations

import hashlib
import io
import struct
from collections.abc import Mapping

import numpy as np
import pytest
from PIL import Image, ImageFile
from tests.support.vision import CONTRADICTORY, png

from penstock_chassis.errors import InvalidArgument
from penstock_inference.engines.base import Media
from penstock_inference.engines.vllm.images import prompt_with_images


def decoded(data: bytes) -> tuple[int, int]:
    media = Media("image/png", hashlib.sha256(data).digest(), data, 0, 1, 5)
    prompt = prompt_with_images(np.array([5], np.int32), [media])
    size: tuple[int, int] = prompt["multi_modal_data"]["image"][0].size
    return size


def two_sizes() -> bytes:
    """A JPEG of 30 x 20 pixels by its first header, and of 90 x 90 by its second."""
    held = io.BytesIO()
    Image.new("RGB", (90, 90)).save(held, "JPEG")
    data = held.getvalue()
    at = data.index(b"\xff\xc0")
    (length,) = struct.unpack_from(">H", data, at + 2)
    header = data[at : at + 2 + length]
    return data[:at] + header[:5] + struct.pack(">HH", 20, 30) + header[9:] + data[at:]


LARGER: Mapping[str, bytes] = {**CONTRADICTORY, "JPEG": two_sizes()}


@pytest.mark.requirement("R26", "R137")
@pytest.mark.parametrize("kind", LARGER)
def test_an_image_that_is_larger_than_its_header_says_is_not_decoded(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would take more memory than was counted."""
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda self: pytest.fail("it was decoded"))
    with pytest.raises(InvalidArgument) as refused:
        decoded(LARGER[kind])
    assert [one.field for one in refused.value.violations] == ["media[0].data"]


@pytest.mark.requirement("R26", "R137")
def test_an_image_of_which_the_decoder_warns_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow warns above its own number of pixels, and refuses only above twice that."""
    assert decoded(png(1, 1)) == (28, 28)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 28 * 28 - 1)
    with pytest.raises(InvalidArgument):
        decoded(png(1, 1))
