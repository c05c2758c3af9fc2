"""Tokenising in stretches gives the ids of the whole text, and each stretch is tokenised once."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from penstock_codec.segments import LONG_BLOCK, SHORTEST, IntArray, Segments

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


def split(pattern: str) -> pre_tokenizers.Sequence:
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )


TOKENIZERS = {
    "gpt2": trained(pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "cl100k": trained(split(CL100K)),
    "o200k": trained(split(O200K)),
    "qwen": trained(split(CL100K.replace("{1,3}", "")), normalizer=normalizers.NFC()),
    "whole text": trained(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)),
    "prefix space": trained(pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "metaspace": trained(pre_tokenizers.Metaspace(prepend_scheme="first", split=False), byte_level=False),
}
BY_LINE = {"gpt2", "cl100k", "o200k", "qwen"}


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
)
LONG = (".", "word " * 60 + "end\n", "x" * 300 + "\n", *SPECIALS, "<tool", "|>", ")", "<|im_end|>\n")
pieces = st.sampled_from(PIECES + LONG)


@pytest.mark.parametrize("name", sorted(TOKENIZERS))
@given(
    text=st.lists(pieces, min_size=1, max_size=60).map("".join),
    filler=st.sampled_from([".\na", "x" * 50, "}\n\n"]),
    length=st.sampled_from([SHORTEST, 2048, LONG_BLOCK]),
)
def test_any_text_gets_the_ids_that_it_gets_as_a_whole(name: str, text: str, filler: str, length: int) -> None:
    """R82, R32: wherever it is cut."""
    tokenizer = TOKENIZERS[name]
    segments = Segments(tokenizer, SPECIALS, Counted(tokenizer))
    long = text + filler * (length // len(filler)) + text
    expected = tokenizer.encode(long, add_special_tokens=False).ids
    assert segments.encode(long).tolist() == expected
    assert segments.encode(long).tolist() == expected, "the second time, from what was kept"


@pytest.mark.parametrize("name", sorted(TOKENIZERS))
def test_only_tokenizers_that_end_a_piece_with_each_line_are_cut_at_lines(name: str) -> None:
    """One that merges over a line's end, or marks the start of a text, is cut at special tokens alone."""
    counted = Counted(TOKENIZERS[name])
    prompt = "<|im_start|>system\n" + "".join(f"Rule {number}: do it.\n" for number in range(200))
    Segments(TOKENIZERS[name], SPECIALS, counted).encode(prompt)
    assert (len(counted.asked) > 100) is (name in BY_LINE)


def test_what_prompts_share_is_tokenised_once_and_what_changed_alone() -> None:
    """A group's system prompt costs its first rollout; a date in it costs its line."""
    counted = Counted(TOKENIZERS["qwen"])
    segments = Segments(counted.tokenizer, SPECIALS, counted)

    def prompt(day: int, task: str) -> str:
        rules = "".join(f"Rule {number}: do it.\n" for number in range(200))
        return (
            f"<|im_start|>system\n{rules}Today is day {day}.\n{rules}<|im_end|>\n<|im_start|>user\n{task}<|im_end|>\n"
        )

    segments.encode(prompt(1, "a"))
    counted.asked.clear()
    segments.encode(prompt(1, "b"))
    assert counted.asked == ["<|im_start|>user\nb"]
    counted.asked.clear()
    segments.encode(prompt(2, "b"))
    assert counted.asked == ["Today is day 2.\n"]


def test_a_group_that_starts_at_once_has_its_prompt_tokenised_once() -> None:
    """R32: the others wait for the first, off the event loop."""
    tokenizer, inside, go = TOKENIZERS["qwen"], threading.Event(), threading.Event()
    counted = Counted(tokenizer)

    def encode(texts: Sequence[str]) -> list[list[int]]:
        inside.set()
        assert go.wait(60)
        return counted(texts)

    segments = Segments(tokenizer, SPECIALS, encode)
    text = "".join(f"Rule {number}: do it well.\n" for number in range(2000))
    with ThreadPoolExecutor(8) as pool:
        work = [pool.submit(segments.encode, text) for _ in range(8)]
        assert inside.wait(60)
        go.set()
        results: list[IntArray] = [item.result() for item in work]
    assert all(result.tolist() == results[0].tolist() for result in results)
    assert sorted(counted.asked) == sorted(set(counted.asked))


def test_what_is_kept_stays_under_its_limit() -> None:
    """The least used goes; what is larger than the limit is not kept."""
    counted = Counted(TOKENIZERS["qwen"])
    segments = Segments(counted.tokenizer, SPECIALS, counted, kept_bytes=40_000)
    often = "<|im_start|>" + "often " * 500
    for number in range(50):
        segments.encode(often)
        segments.encode(f"<|im_start|>{number}" + "once " * 500)
    assert counted.asked.count(often) == 1
    segments.encode("<|im_start|>" + "large " * 20_000)
    counted.asked.clear()
    segments.encode("<|im_start|>" + "large " * 20_000)
    assert counted.asked


def test_a_long_block_is_kept_in_one_piece_and_a_line_that_changes_costs_that_line() -> None:
    """R32: what a group shares is found in one step, and what differs is all that is tokenised."""
    counted = Counted(TOKENIZERS["qwen"])
    segments = Segments(counted.tokenizer, SPECIALS, counted)
    lines = [f"Rule {number}: say what you do.\n" for number in range(2 * LONG_BLOCK // 20)]
    first = segments.encode("".join(["<|im_start|>", *lines, "<|im_end|>a"]))
    counted.asked.clear()
    assert segments.encode("".join(["<|im_start|>", *lines, "<|im_end|>a"])).tolist() == first.tolist()
    assert not counted.asked
    lines[50] = "Today: Sunday.\n"
    segments.encode("".join(["<|im_start|>", *lines, "<|im_end|>a"]))
    assert counted.asked == ["Today: Sunday.\n"]
