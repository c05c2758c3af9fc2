"""Vocabularies with byte fallback decode as their own tokenizer decodes them, in pieces too."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from penstock_codec import Codec, CodecError, TokenizerFiles

TEMPLATE = "{% for m in messages %}[{{ m.role }}] {{ m.content }}</s>{% endfor %}[assistant]"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", *"abc[]usertin", "\u2581a"]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("\u2581", "a")], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken("</s>", special=True, normalized=False)])
    return tokenizer


@pytest.fixture(scope="module")
def fallback(tokenizer: Tokenizer) -> Codec:
    stop = tokenizer.token_to_id("</s>")
    assert stop is not None
    return Codec.load(TokenizerFiles(tokenizer.to_str().encode(), TEMPLATE, (stop,)))


@pytest.mark.requirement("R82")
@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\u2581"), max_size=20))
def test_byte_fallback_decodes_as_the_tokenizer_does(fallback: Codec, tokenizer: Tokenizer, text: str) -> None:
    """Any text comes back, by bytes where the vocabulary has no token for it."""
    ids = fallback.encode(text)
    assert fallback.decode(ids) == text == tokenizer.decode(ids.tolist())
    stream = fallback.stream_parser()
    for index in ids.tolist():
        stream.feed([index])
    assert stream.finish()[1].message.text == text


@pytest.mark.requirement("R82")
def test_a_familys_turns_end_with_its_own_stop_token(fallback: Codec) -> None:
    """The end of a turn is read off the template."""
    assert fallback.end_of_turn_id in fallback.stop_token_ids
    assert fallback.parser == "none"


@pytest.mark.requirement("R63")
def test_a_vocabulary_whose_tokens_are_no_bytes_is_refused(tokenizer: Tokenizer) -> None:
    """Nothing is decoded by guesswork."""
    other = Tokenizer.from_str(tokenizer.to_str())
    other.decoder = decoders.WordPiece()
    with pytest.raises(CodecError) as caught:
        Codec.load(TokenizerFiles(other.to_str().encode(), TEMPLATE))
    assert caught.value.reason == "TOKENIZER_UNSUPPORTED"
