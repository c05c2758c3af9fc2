"""The tokenizer and template that are made on the spot."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_codec import Codec, tiny_tokenizer


@pytest.mark.requirement("R87")
def test_the_same_texts_give_the_same_bytes() -> None:
    """A tokenizer's hash names it, wherever it was trained."""
    texts = ["the quick brown fox jumps over the lazy dog", "cat note.txt > file"] * 5
    assert tiny_tokenizer.build(texts, 320) == tiny_tokenizer.build(texts, 320)


@pytest.mark.requirement("R82")
def test_every_special_token_is_one_id_and_control_tokens_do_not_show(codec: Codec) -> None:
    """Ids 0 to 8 in the order of SPECIAL_TOKENS."""
    assert codec.encode("".join(tiny_tokenizer.SPECIAL_TOKENS)).tolist() == list(
        range(len(tiny_tokenizer.SPECIAL_TOKENS))
    )
    shown = codec.decode(range(len(tiny_tokenizer.SPECIAL_TOKENS)), skip_special=True)
    assert shown == "".join(tiny_tokenizer.MARKUP_TOKENS)


@pytest.mark.requirement("R63")
def test_a_vocabulary_without_room_for_every_byte_is_refused() -> None:
    """The size that was asked for is kept or refused."""
    with pytest.raises(ValueError, match="265"):
        tiny_tokenizer.build([], tiny_tokenizer.MIN_VOCAB - 1)
    assert Codec.load(tiny_tokenizer.build([], tiny_tokenizer.MIN_VOCAB)).vocab_size == tiny_tokenizer.MIN_VOCAB


@pytest.mark.requirement("R82")
def test_training_texts_with_markup_leave_no_trace_of_it_in_the_merges() -> None:
    """A plain "<" is tokenised the same whatever markup the texts held."""
    texts = ["<tool_call>run</tool_call><|im_end|>"] * 20
    codec = Codec.load(tiny_tokenizer.build(texts, 400))
    assert codec.decode(codec.encode("<tool")) == "<tool"
    assert codec.encode("<tool").size == len("<tool")


@pytest.mark.requirement("R82")
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_any_text_survives_both_ways_of_encoding(codec: Codec, text: str) -> None:
    """Byte-wise ids are other ids for the same text."""
    assert codec.decode(codec.encode(text)) == text
    assert codec.decode(tiny_tokenizer.bytewise(text)) == text
