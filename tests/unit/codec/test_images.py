"""Images of prompts: their size, and the tokens that stand for them."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tests.support.vision import CONTRADICTORY, PLACEHOLDER_ID, RULE, png, png_with, tokenizer_files

from penstock_codec import Codec, CodecError, images
from penstock_codec.chat import ImagePart, Message, Role, TextPart, Tool, ToolCallPart, ToolResultPart
from penstock_codec.image_files import MOST_STEPS, Measured, measure
from penstock_codec.images import MAX_IMAGES, ImageRule
from penstock_codec.splice import Continuation

CALL = ToolCallPart("call_1", "look", "{}")
TOOLS = [Tool("look", "Take a screenshot.", '{"type": "object"}')]


def image(columns: int, rows: int, shade: int = 0) -> ImagePart:
    return ImagePart.inline(png(columns, rows, shade), "image/png")


def user(*parts: Any) -> Message:
    return Message(Role.USER, tuple(TextPart(part) if isinstance(part, str) else part for part in parts))


@pytest.fixture(scope="module")
def codec() -> Codec:
    return Codec.load(tokenizer_files(["what is on the screen"]))


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "WEBP"])
def test_an_images_size_is_read_from_its_header(kind: str) -> None:
    """Of each kind; a file that is cut off there, or of another kind, has none."""
    held = io.BytesIO()
    Image.new("RGB", (301, 77), "red").save(held, kind)
    data = held.getvalue()
    assert measure(data) == Measured(f"image/{kind.lower()}", 301, 77)
    assert measure(data[:9]) is None and measure(b"BM" + data) is None


def test_lossless_and_extended_webp_have_sizes_too() -> None:
    """They have headers of their own."""
    for options in ({"lossless": True}, {"lossless": True, "exif": b"Exif\0\0"}):
        held = io.BytesIO()
        Image.new("RGBA", (33, 500), (9, 9, 9, 99)).save(held, "WEBP", **options)
        assert measure(held.getvalue()) == Measured("image/webp", 33, 500)


@pytest.mark.requirement("R26", "R137")
@pytest.mark.parametrize("kind", CONTRADICTORY)
def test_an_image_that_decodes_to_another_size_than_its_header_has_none(kind: str) -> None:
    """A small header would stand for much memory."""
    assert measure(CONTRADICTORY[kind]) is None


@pytest.mark.requirement("R32", "R137")
def test_what_stands_before_an_image_is_read_up_to_a_bound() -> None:
    """Chunks, blocks and filling: a file of 16 MiB has millions of them."""
    held = io.BytesIO()
    Image.new("RGB", (30, 20)).save(held, "JPEG")
    for size in (MOST_STEPS // 2, MOST_STEPS):
        jpeg = b"\xff\xd8" + b"\xff" * size + held.getvalue()[2:]
        chunks = png_with(b"\0\0\0\0teXt\0\0\0\0" * size)
        gif = b"GIF89a\x1e\0\x14\0\0\0\0!\xfe" + b"\1x" * size + b"\0,\0\0\0\0\x1e\0\x14\0"
        found = [measure(data) for data in (jpeg, chunks, gif)]
        assert [one is None for one in found] == [size == MOST_STEPS] * 3


@pytest.mark.requirement("R32", "R137")
def test_an_image_that_was_measured_is_not_measured_again(codec: Codec, monkeypatch: pytest.MonkeyPatch) -> None:
    """A conversation is planned with each call, and has all its images."""
    data = png(2, 3)
    known = ImagePart.inline(data, "image/png", (56, 84))
    assert known == ImagePart.inline(data, "image/png")
    monkeypatch.setattr(images, "measure", lambda data: pytest.fail("it was measured again"))
    assert [one.grid for one in codec.prompt([user(known)]).images] == [(1, 6, 4)]


QWEN: Mapping[str, Any] = {"model_type": "qwen2_vl", "image_token_id": 7}
LLAVA: Mapping[str, Any] = {
    "model_type": "llava",
    "image_token_index": 9,
    "vision_config": {"model_type": "clip_vision_model", "image_size": 336, "patch_size": 14},
}


@pytest.mark.requirement("R137")
@pytest.mark.parametrize(
    ("size", "grid"),
    [((56, 56), (1, 4, 4)), ((280, 112), (1, 8, 20)), ((1920, 1080), (1, 52, 94)), ((10, 20), (1, 6, 4))],
    ids=["exact", "wide", "shrunk", "grown"],
)
def test_qwens_images_take_a_token_for_each_square(size: tuple[int, int], grid: tuple[int, ...]) -> None:
    """The figures are those of the model's own preprocessor."""
    rule = ImageRule.of_model(QWEN, {"patch_size": 14, "merge_size": 2, "min_pixels": 3136, "max_pixels": 1003520})
    assert rule is not None and rule.tokens(*size) == (grid[1] * grid[2] // 4, grid)
    assert ImageRule.from_json(rule.to_json()) == rule


def test_llavas_images_all_take_as_many_tokens() -> None:
    """One for each patch; the whole image's own is left out by default."""
    rule = ImageRule.of_model(LLAVA, {})
    assert rule is not None and rule.placeholder_id == 9 and rule.tokens(10, 3000) == (576, ())
    whole = ImageRule.of_model({**LLAVA, "vision_feature_select_strategy": "full"}, {})
    assert whole is not None and whole.tokens(1, 1) == (577, ())


def test_models_without_a_known_rule_have_none_and_a_broken_one_is_refused() -> None:
    """Text models, and vision models that count in another way."""
    assert ImageRule.of_model({"model_type": "qwen3"}, {}) is None
    assert ImageRule.of_model({"model_type": "gemma3"}, {"patch_size": 14}) is None
    for config, preprocessor in (({"model_type": "qwen2_vl"}, {"patch_size": 14}), (QWEN, {"patch_size": "14"})):
        with pytest.raises(CodecError) as refused:
            ImageRule.of_model(config, preprocessor)
        assert refused.value.reason == "FILES_INCOMPLETE"


@pytest.mark.requirement("R82", "R137")
def test_placeholders_of_new_turns_are_those_of_the_whole_conversation(codec: Codec) -> None:
    """A continuation has the ids that rendering everything has, screenshots of tools included."""
    first = [user("what is ", image(2, 3), " and ", image(1, 1))]
    turn = Message.assistant("", CALL)
    new = [
        Message(Role.TOOL, (ToolResultPart("call_1", "done", images=(image(4, 2),)),)),
        user("and now?", image(1, 2)),
    ]
    begun = codec.prompt(first, TOOLS)
    assert [(one.count, one.grid) for one in begun.images] == [(6, (1, 6, 4)), (1, (1, 2, 2))]
    for one in begun.images:
        assert (begun.ids[one.start : one.start + one.count] == PLACEHOLDER_ID).all()
    sampled = codec.encode('<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call><|im_end|>')
    more = codec.continuation([*first, turn], new, TOOLS, last_id=int(sampled[-1]))
    assert isinstance(more, Continuation)
    whole = codec.prompt([*first, turn, *new], TOOLS)
    np.testing.assert_array_equal(np.concatenate([begun.ids, sampled, more.ids]), whole.ids)
    at = begun.ids.size + sampled.size
    assert [(at + one.start, one.count) for one in more.images] == [(one.start, one.count) for one in whole.images[2:]]
    assert [one.image for one in whole.images] == [*first[0].images, *new[0].images, *new[1].images]


@pytest.mark.requirement("R137")
def test_a_text_cannot_spell_a_placeholder(codec: Codec) -> None:
    """It stays text: the prompt has the tokens of its images only."""
    made = codec.prompt([user("<|image_pad|> ", image(1, 1))])
    assert (made.ids == PLACEHOLDER_ID).sum() == 1


WRONG: Mapping[str, tuple[ImagePart, ...]] = {
    "IMAGE_REMOTE": (ImagePart("https://example.com/a.png"),),
    "IMAGE_INVALID": (ImagePart.inline(b"GIF", "image/gif"),),
    "IMAGE_LIMIT": (image(1, 1),) * (MAX_IMAGES + 1),
}


@pytest.mark.requirement("R137")
@pytest.mark.parametrize("reason", WRONG)
def test_images_that_cannot_be_placed_are_refused_by_name(codec: Codec, reason: str) -> None:
    with pytest.raises(CodecError) as refused:
        codec.prompt([user(*WRONG[reason])])
    assert refused.value.reason == reason


def test_a_place_where_the_template_shows_no_image_is_refused(codec: Codec) -> None:
    """The system's instructions are text there: an image would be lost."""
    with pytest.raises(CodecError) as refused:
        codec.prompt([Message(Role.ASSISTANT, (image(1, 1),)), user("so?")])
    assert refused.value.reason in ("IMAGE_UNSUPPORTED", "TEMPLATE_REFUSED")


def test_files_keep_the_rule(tmp_path: Any) -> None:
    """A trainer with the tokenizer alone places images as the model does."""
    tokenizer_files().write(tmp_path)
    assert type(tokenizer_files()).from_directory(tmp_path).images == RULE
