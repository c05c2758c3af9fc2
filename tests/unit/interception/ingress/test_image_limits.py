"""Bounds of images in agents' requests."""

from __future__ import annotations

import base64
from collections.abc import Mapping

import pytest
from tests.support.vision import data_url, png

from penstock_codec.chat import ImagePart, Message, Role
from penstock_codec.images import MAX_BYTES, MAX_IMAGES
from penstock_interception.domain.requests import ChatRequest
from penstock_interception.ingress.dialects.base import BadRequest
from penstock_interception.ingress.dialects.images import image_at, images_within_limit, inline_image

WRONG: Mapping[str, tuple[str, str]] = {
    "bytes": ("data:image/png;base64," + base64.b64encode(bytes(MAX_BYTES + 1)).decode(), "image_limit"),
    "pixels": (data_url(png(250, 250)), "image_limit"),
    "alphabet": ("data:image/png;base64,a$b=", "invalid_value"),
    "text": ("data:image/svg+xml,<svg/>", "invalid_value"),
    "nothing": ("data:image/png;base64,", "invalid_value"),
}


@pytest.mark.requirement("R26", "R137")
@pytest.mark.parametrize("what", WRONG)
def test_what_is_too_large_or_no_base64_is_refused_by_its_field(what: str) -> None:
    url, code = WRONG[what]
    with pytest.raises(BadRequest) as refused:
        image_at(url, "messages.content.image_url.url")
    assert (refused.value.param, refused.value.code) == ("messages.content.image_url.url", code)


class Untranslated(str):
    """A text of which no letter is looked at."""

    def rstrip(self, chars: str | None = None, /) -> str:
        pytest.fail(f"{chars} was looked for")


@pytest.mark.requirement("R32", "R137")
def test_a_text_with_other_letters_than_ascii_is_refused_before_it_is_read() -> None:
    """Letter by letter, 16 MiB would stall the gate."""
    with pytest.raises(BadRequest) as refused:
        inline_image(Untranslated("é" + "A" * 9), "image/png", "url")
    assert (refused.value.param, refused.value.code) == ("url", "invalid_value")


def test_an_images_kind_is_what_its_bytes_say() -> None:
    """Not what the agent says. Addresses are left as they are. Its size is kept, so that it is measured once."""
    image = image_at(data_url(png(1, 1), "image/jpeg"), "url")
    assert (image, image.size) == (ImagePart.inline(png(1, 1), "image/png"), (28, 28))
    assert image_at("https://x/y.png", "url", "image/png") == ImagePart("https://x/y.png", "image/png")


def test_a_conversation_has_a_bounded_number_of_images() -> None:
    image = ImagePart("https://x/y.png")
    whole = ChatRequest("m", (Message(Role.USER, (image,) * MAX_IMAGES),))
    assert images_within_limit(whole) == [image] * MAX_IMAGES
    with pytest.raises(BadRequest) as refused:
        images_within_limit(ChatRequest("m", (Message(Role.USER, (image,)), Message(Role.USER, (image,) * MAX_IMAGES))))
    assert refused.value.param == "messages"
