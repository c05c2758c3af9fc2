"""SHA-256 of texts that begin alike is SHA-256."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_interception.cache import PIECE, PrefixDigests

PIECES = [bytes([byte]) * PIECE for byte in range(3)]
texts = st.tuples(st.lists(st.sampled_from(PIECES), max_size=4), st.binary(max_size=40)).map(
    lambda parts: b"".join(parts[0]) + parts[1]
)


@pytest.mark.requirement("R82")
@given(st.lists(texts, max_size=12), st.integers(0, 6))
def test_digest_is_that_of_the_whole_text_whatever_is_cached(all_of_them: list[bytes], kept: int) -> None:
    """A prompt's digest is of its ids, however much of it was known, and however little is kept."""
    digests = PrefixDigests(kept)
    for text in all_of_them:
        assert digests.sha256(text) == hashlib.sha256(text).digest()
        assert len(digests) <= kept


@pytest.mark.requirement("R82")
def test_cached_piece_is_not_reused_behind_another_prefix() -> None:
    """What is looked up is the piece and all that stands before it."""
    digests = PrefixDigests()
    first, second, same = PIECES
    for text in (first + same, second + same, same + same, first + same):
        assert digests.sha256(text) == hashlib.sha256(text).digest()
    assert len(digests) == 6


@pytest.mark.requirement("R32")
def test_threads_that_hash_the_same_at_once_get_the_same() -> None:
    """Prompts are planned in threads."""
    digests = PrefixDigests(8)
    wanted = [b"".join(PIECES[: 1 + number % 3]) + bytes([number % 7]) for number in range(400)]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(digests.sha256, wanted)) == [hashlib.sha256(text).digest() for text in wanted]
