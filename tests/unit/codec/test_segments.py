"""Tokenising in stretches gives the ids of the whole text, and what was tokenised once is not tokenised again."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from penstock_codec import Codec, TokenizerFiles, tiny_tokenizer
from penstock_codec.cache import Caches
from penstock_codec.segments import LONG_BLOCK, SHORTEST, IntArray, Segments
from penstock_codec.word_cache import MOST_NEW, Words, splits_at_words

SPECIALS = ("<|im_start|>", "<|im_end|>", "<tool_call>")
TEXTS = [
    "def f(x):\n    return x.\n\nThe end.\nNow {a: 1},\n'll do. a's\n#x\n/usr\n" * 3,
    "# é 字\n77 88\n",
    ".\n/a\n}\n(b",
]
CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"  # white space, of which the last may belong to the next piece
)
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK = (
    r"\p{N}{1,3}",
    r"[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)


def trained(
    pre_tokenizer: pre_tokenizers.PreTokenizer,
    *,
    byte_level: bool = True,
    normalizer: normalizers.Normalizer | None = None,
) -> Tokenizer:
    """A small BPE with many merges, so that a wrong cut shows."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=not byte_level))
    tokenizer.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.decoder = decoders.ByteLevel() if byte_level else decoders.ByteFallback()
    alphabet = pre_tokenizers.ByteLevel.alphabet() if byte_level else map(chr, range(32, 127))
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        special_tokens=[AddedToken(text, special=True, normalized=False) for text in SPECIALS],
        initial_alphabet=sorted(alphabet),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS * 20, trainer)
    return tokenizer


def split(*patterns: str) -> pre_tokenizers.Sequence:
    steps = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    return pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(False, use_regex=False)])


TOKENIZERS = {
    "gpt2": trained(pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "cl100k": trained(split(CL100K)),
    "o200k": trained(split(O200K)),
    "qwen": trained(split(CL100K.replace("{1,3}", "")), normalizer=normalizers.NFC()),
    "deepseek": trained(split(*DEEPSEEK)),
    "words together": trained(split(r"[a-z]+(?: [a-z]+)?|[^a-z]+")),
    "whole text": trained(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)),
    "prefix space": trained(pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "metaspace": trained(pre_tokenizers.Metaspace(prepend_scheme="first", split=False), byte_level=False),
}
BY_WORD = {"gpt2", "cl100k", "o200k", "qwen", "deepseek"}


@pytest.fixture(scope="module", autouse=True)
def probed_once() -> Iterator[None]:
    """Whether a tokenizer splits at words is found out for each, not for each of hundreds of examples."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("penstock_codec.segments.splits_at_words", functools.cache(splits_at_words))
        yield


class Counted:
    """A tokenizer that notes what it is asked."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.asked: list[str] = []

    def __call__(self, texts: Sequence[str]) -> list[list[int]]:
        self.asked += texts
        return [item.ids for item in self.tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]


PIECES = (
    ".\n",
    "\n",
    "\n\n",
    "}\n",
    " \n",
    "\r\n",
    "\t",
    " ",
    "a",
    "Z",
    "'s",
    "77",
    "é",
    "e\u0301",
    "\u0301",
    "字",
    "/",
    "#",
    "{",
    "word",
    " word",
    "  if",
    "\n    x",
    ":\n\t",
    " /usr",
    "\xa0",
    "\x85",
    "\u2028",
    "\x1c",
    " \u200b",
    "\0",
    " —",
)
LONG = (".", "word " * 60 + "end\n", "x" * 300 + "\n", *SPECIALS, "<tool", "|>", ")", "<|im_end|>\n")
pieces = st.sampled_from(PIECES + LONG)


@pytest.mark.requirement("R32", "R82")
@pytest.mark.parametrize("name", sorted(TOKENIZERS))
@given(
    text=st.lists(pieces, min_size=1, max_size=60).map("".join),
    filler=st.sampled_from([".\na", "x" * 50, "}\n\n"]),
    length=st.sampled_from([SHORTEST, 2048, LONG_BLOCK]),
)
def test_any_text_gets_the_ids_that_it_gets_as_a_whole(name: str, text: str, filler: str, length: int) -> None:
    """Wherever it is cut."""
    tokenizer = TOKENIZERS[name]
    segments = Segments(tokenizer, SPECIALS, Counted(tokenizer), Caches())
    long = text + filler * (length // len(filler)) + text
    expected = tokenizer.encode(long, add_special_tokens=False).ids
    assert segments.encode(long).tolist() == expected
    assert segments.encode(long).tolist() == expected, "the second time, from what was kept"


@pytest.mark.requirement("R82")
@pytest.mark.parametrize("name", sorted(TOKENIZERS))
@given(
    text=st.lists(st.characters(exclude_categories=["Cs"]) | pieces, max_size=40).map("".join), again=st.integers(1, 3)
)
def test_any_characters_get_the_ids_that_they_get_as_a_whole(name: str, text: str, again: int) -> None:
    """Whatever Unicode holds, and a second time beside other text."""
    tokenizer = TOKENIZERS[name]
    segments = Segments(tokenizer, SPECIALS, Counted(tokenizer), Caches())
    for count in range(1, again + 1):
        repeated = " ".join([text] * count) + "\n" + text
        assert segments.encode(repeated).tolist() == tokenizer.encode(repeated, add_special_tokens=False).ids


between_specials = (
    st.lists(pieces, max_size=8).map("".join).filter(lambda text: not any(special in text for special in SPECIALS))
)


@pytest.mark.requirement("R82")
@given(st.lists(between_specials, min_size=1, max_size=12), st.integers(0, 5))
def test_forgotten_words_are_tokenised_again(texts: list[str], most: int) -> None:
    """The same ids however few words are kept, of texts as `Segments` cuts them: without a special token."""
    tokenizer = TOKENIZERS["qwen"]
    words = Words(Counted(tokenizer), Caches(words=most).words)
    for text in texts * 2:
        assert words.ids([text]).tolist() == tokenizer.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("name", sorted(TOKENIZERS))
def test_only_tokenizers_that_split_at_words_are_cut_at_words(name: str) -> None:
    """One that merges over a space, or marks the start of a text, is cut at special tokens alone."""
    counted = Counted(TOKENIZERS[name])
    prompt = "<|im_start|>system\n" + "".join(f"Rule {number}: do it.\n" for number in range(200))
    Segments(TOKENIZERS[name], SPECIALS, counted, Caches()).encode(prompt)
    assert (len(counted.asked) > 100) is (name in BY_WORD)


@pytest.mark.requirement("R82")
@pytest.mark.parametrize(
    "token",
    [
        AddedToken("two words", normalized=False),
        AddedToken("<|left|>", normalized=False, lstrip=True),
        AddedToken("<|right|>", normalized=False, rstrip=True),
        AddedToken("alone", normalized=False, single_word=True),
    ],
    ids=str,
)
def test_added_tokens_that_take_spaces_along_are_left_whole(token: AddedToken) -> None:
    """So is a token of several words, and one that is looked for between words only."""
    tokenizer = Tokenizer.from_str(TOKENIZERS["qwen"].to_str())
    tokenizer.add_tokens([token])
    files = TokenizerFiles(tokenizer.to_str().encode(), tiny_tokenizer.chat_template())
    codec = Codec.load(files)
    for text in (f"a.\n {token.content} \n b {token.content}s. x{token.content}", token.content):
        assert codec.encode(text).tolist() == tokenizer.encode(text, add_special_tokens=False).ids


def test_shared_prompts_are_tokenised_once_and_changes_alone() -> None:
    """A group's system prompt costs its first rollout; a date in it costs its words."""
    counted = Counted(TOKENIZERS["qwen"])
    segments = Segments(counted.tokenizer, SPECIALS, counted, Caches())

    def prompt(day: int, task: str) -> str:
        rules = "".join(f"Rule {number}: do it.\n" for number in range(200))
        return (
            f"<|im_start|>system\n{rules}Today is day {day}.\n{rules}<|im_end|>\n<|im_start|>user\n{task}<|im_end|>\n"
        )

    segments.encode(prompt(1, "a"))
    assert len(counted.asked) == len(set(counted.asked))
    counted.asked.clear()
    segments.encode(prompt(1, "b"))
    assert counted.asked == ["b"]
    counted.asked.clear()
    segments.encode(prompt(2, "b"))
    assert counted.asked == [" 2.\n"]


@pytest.mark.requirement("R32")
def test_a_group_that_starts_at_once_has_its_prompt_tokenised_once() -> None:
    """The others wait for the first, off the event loop."""
    tokenizer, inside, go = TOKENIZERS["qwen"], threading.Event(), threading.Event()
    counted = Counted(tokenizer)

    def encode(texts: Sequence[str]) -> list[list[int]]:
        inside.set()
        assert go.wait(60)
        return counted(texts)

    segments = Segments(tokenizer, SPECIALS, encode, Caches())
    text = "".join(f"Rule {number}: do it well.\n" for number in range(2000))
    with ThreadPoolExecutor(8) as pool:
        work = [pool.submit(segments.encode, text) for _ in range(8)]
        assert inside.wait(60)
        go.set()
        results: list[IntArray] = [item.result() for item in work]
    assert all(result.tolist() == results[0].tolist() for result in results)
    assert sorted(counted.asked) == sorted(set(counted.asked))


def test_cache_stays_under_its_limit() -> None:
    """The least used goes; what is larger than the limit is not kept."""
    counted = Counted(TOKENIZERS["whole text"])
    segments = Segments(counted.tokenizer, SPECIALS, counted, Caches(block_bytes=40_000))
    often = "<|im_start|>" + "often " * 500
    for number in range(50):
        segments.encode(often)
        segments.encode(f"<|im_start|>{number}" + "once " * 500)
    assert counted.asked.count(often) == 1
    segments.encode("<|im_start|>" + "large " * 20_000)
    counted.asked.clear()
    segments.encode("<|im_start|>" + "large " * 20_000)
    assert counted.asked


def test_a_long_word_is_not_kept() -> None:
    """Paths, digests and texts without spaces come once; words stay."""
    counted = Counted(TOKENIZERS["qwen"])
    segments = Segments(counted.tokenizer, SPECIALS, counted, Caches())
    digest = "ab" * 40
    segments.encode(f"a digest {digest}")
    counted.asked.clear()
    segments.encode(f"a digest {digest}")
    assert counted.asked == [f" {digest}"]


@pytest.mark.requirement("R23")
def test_text_of_very_many_new_words_is_left_whole() -> None:
    """So that no text makes the gate hold an object for each of millions of words."""
    counted = Counted(TOKENIZERS["qwen"])
    segments = Segments(counted.tokenizer, SPECIALS, counted, Caches())
    text = " ".join(str(number) for number in range(MOST_NEW + 1))
    assert segments.encode(text).tolist() == counted.tokenizer.encode(text, add_special_tokens=False).ids
    assert counted.asked == [text]
