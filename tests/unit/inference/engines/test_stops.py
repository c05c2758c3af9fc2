"""Stop texts, as a property over any text and any way of cutting it into tokens."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from penstock_codec import tiny_tokenizer
from penstock_codec.decoding import Detokenizer
from penstock_inference.engines.stops import StopTexts

TOKENIZER = Tokenizer.from_str(tiny_tokenizer.train_tokenizer(["ab abc aab ünï"], 300).decode())
DETOKENIZER = Detokenizer(TOKENIZER)
SIZE = TOKENIZER.get_vocab_size()

texts = st.text("abcü ", min_size=0, max_size=30)
stops = st.lists(st.text("abcü ", min_size=1, max_size=4), min_size=1, max_size=3)


@pytest.mark.requirement("R63")
@settings(deadline=None)
@given(texts, stops)
def test_the_first_token_that_completes_a_stop_text_ends_the_completion(text: str, wanted: list[str]) -> None:
    """Wherever the text begins and ends in tokens."""
    watch, stream, shown = StopTexts(DETOKENIZER, wanted, SIZE), DETOKENIZER.stream(), ""
    for token in TOKENIZER.encode(text, add_special_tokens=False).ids:
        shown += stream.push([token])
        found = watch.push(token)
        assert (found is not None) == any(stop in shown for stop in wanted)
        if found is not None:
            starts = {stop: shown.find(stop) for stop in wanted if stop in shown}
            assert starts[found] == min(starts.values())
            assert len(found) == max(len(stop) for stop, at in starts.items() if at == starts[found])
            return


@pytest.mark.requirement("R63")
@settings(deadline=None)
@given(texts, stops)
def test_a_stop_text_is_found_at_the_token_that_completes_it_and_at_no_later_one(text: str, wanted: list[str]) -> None:
    """A completion goes on after a stop text that `min_tokens` suppresses, and then must not end for that text."""
    watch, stream, shown = StopTexts(DETOKENIZER, wanted, SIZE), DETOKENIZER.stream(), ""
    for token in TOKENIZER.encode(text, add_special_tokens=False).ids:
        before = len(shown)
        shown += stream.push([token])
        ends = {shown.find(stop, max(0, before - len(stop) + 1)) for stop in wanted}
        assert (watch.push(token) is not None) == (ends != {-1})


@pytest.mark.requirement("R63")
def test_a_suppressed_stop_text_is_not_found_again_beside_a_longer_one() -> None:
    a, b, c = (TOKENIZER.encode(char, add_special_tokens=False).ids[0] for char in "abc")
    watch = StopTexts(DETOKENIZER, ["ab", "x" * 30], SIZE)
    assert [watch.push(token) for token in (a, b, c, c, a, b)] == [None, "ab", None, None, None, "ab"]


def test_a_token_that_the_tokenizer_does_not_know_is_no_text() -> None:
    """A model's vocabulary may be padded beyond its tokenizer's."""
    watch = StopTexts(DETOKENIZER, ["ab"], SIZE)
    a, b = (TOKENIZER.encode(char, add_special_tokens=False).ids[0] for char in "ab")
    assert [watch.push(token) for token in (a, SIZE + 3, b)] == [None, None, "ab"]
