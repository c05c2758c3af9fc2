"""Bodies without the text of their images."""

from __future__ import annotations

import base64
import json

import pytest

from penstock_codec.chat import ImagePart
from penstock_interception.domain.folded_bodies import fold, unfold

ONE, OTHER = (ImagePart.inline(bytes([shade]) * 900, "image/png") for shade in (1, 2))


def body_of(*images: ImagePart) -> bytes:
    return json.dumps([{"text": "é", "url": image.url} for image in images]).encode()


@pytest.mark.requirement("R137")
@pytest.mark.parametrize(
    "shown", [[ONE], [ONE, OTHER], [OTHER, ONE, OTHER, ONE], [ONE, ONE]], ids=["one", "two", "mixed", "same"]
)
def test_a_folded_body_is_put_together_byte_for_byte(shown: list[ImagePart]) -> None:
    """Each image is kept once, however often it is there."""
    body = body_of(*shown)
    folded = fold(body, shown)
    assert folded is not None and len(folded.body) == len(body) - 1200 * len(shown)
    assert len(folded.images) == len({image.ref for image in shown}) and len(folded.cuts) == len(shown)
    assert unfold(folded.body, folded.cuts, {digest: data for digest, (_, data) in folded.images.items()}) == body


def test_an_image_in_another_form_stays_in_the_body() -> None:
    """Such as with escaped slashes or the URL-safe alphabet: what is not found is not cut out."""
    image = ImagePart.inline(b"\xff" * 90, "image/png")
    text = base64.b64encode(image.data)
    for body in (text.replace(b"/", b"\\/"), base64.urlsafe_b64encode(image.data)):
        folded = fold(body, [image])
        assert folded is not None and (folded.body, folded.cuts) == (body, ())
        assert folded.images == {image.sha256: ("image/png", image.data)}


@pytest.mark.requirement("R32", "R137")
def test_a_body_of_which_images_are_less_than_half_stays_whole() -> None:
    """Its other text, of an agent's choice, is not searched; the image is kept apart all the same."""
    image = base64.b64encode(ONE.data)
    for others, cuts in ((len(image), 1), (len(image) + 1, 0)):
        body = b" " * others + image
        folded = fold(body, [ONE])
        assert folded is not None and (len(folded.cuts), len(folded.images)) == (cuts, 1)
        assert unfold(folded.body, folded.cuts, {ONE.sha256: ONE.data}) == body


def test_an_image_is_found_beside_other_runs_of_its_alphabet() -> None:
    """Short ones, long ones, and one that ends with padding just before it."""
    image = base64.b64encode(ONE.data)
    body = b"A" * 63 + b" " + b"B" * 64 + b"==" + image + b'"' + b"C" * 63
    folded = fold(body, [ONE])
    assert folded is not None and folded.body == body.replace(image, b"") and folded.cuts == ((130, ONE.sha256),)


def test_a_body_without_images_is_not_folded() -> None:
    """Those by address have no bytes."""
    assert fold(b"{}", []) is None and fold(b"{}", [ImagePart("https://x/y.png")]) is None
