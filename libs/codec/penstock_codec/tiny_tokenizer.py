"""A small tokenizer and a ChatML template with tools, built on demand: for tests, the scripted engine and the demo.

`build(texts)` trains a byte-level BPE, so any text can be encoded; every special token is one id. The same texts and
size give the same bytes. A `Family` builds one for another template than ChatML.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import resources

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from penstock_codec.decoding import STAND_INS
from penstock_codec.tokenizer_files import TokenizerFiles

END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
CONTROL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)
MARKUP_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
SPECIAL_TOKENS = CONTROL_TOKENS + MARKUP_TOKENS
MIN_VOCAB = 256 + len(SPECIAL_TOKENS)

_SPECIAL = re.compile("(" + "|".join(re.escape(token) for token in SPECIAL_TOKENS) + ")")
# The byte tokens come after the special ones, in the order of their printable stand-ins.
_BYTE_IDS = {byte: len(SPECIAL_TOKENS) + rank for rank, byte in enumerate(STAND_INS.values())}


@dataclass(frozen=True, slots=True)
class Family:
    """The differences between families of models: special tokens, and the template that uses them.

    `controls` never show in decoded text, `markup` does; `turn_end` is the token that closes an assistant's turn.
    """

    chat_template: str
    controls: tuple[str, ...] = CONTROL_TOKENS
    markup: tuple[str, ...] = MARKUP_TOKENS
    turn_end: str = TURN_END
    other_stops: tuple[str, ...] = ()
    bos: str = END_OF_TEXT

    def build(self, texts: Iterable[str] = (), vocab_size: int = 384) -> TokenizerFiles:
        """Returns the files of a small model of the family: a tokenizer trained on `texts`, the template, the stops."""
        tokens = (*self.controls, *self.markup)
        return TokenizerFiles(
            tokenizer_json=train_tokenizer(texts, vocab_size, self.controls, self.markup),
            chat_template=self.chat_template,
            stop_token_ids=tuple(tokens.index(text) for text in (self.turn_end, *self.other_stops)),
            special_tokens={"bos_token": self.bos, "eos_token": self.turn_end, "pad_token": self.controls[0]},
        )


def chat_template() -> str:
    """The text of our own ChatML template with tools (templates/chatml.jinja)."""
    return resources.files("penstock_codec").joinpath("templates/chatml.jinja").read_text("utf-8")


def train_tokenizer(
    texts: Iterable[str],
    vocab_size: int = 384,
    controls: tuple[str, ...] = CONTROL_TOKENS,
    markup: tuple[str, ...] = MARKUP_TOKENS,
) -> bytes:
    """Trains a byte-level BPE of at most `vocab_size` ids on `texts`; returns a tokenizer.json.

    The first ids are the control tokens and the markup in order, then the bytes, the rest are merges. Control tokens
    are `special` and never show in decoded text; markup tokens are plain added tokens, as in the Qwen family.
    """
    specials = (*controls, *markup)
    if vocab_size < 256 + len(specials):
        raise ValueError(f"vocab_size must be at least {MIN_VOCAB}: every byte and every special token has an id")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(text, special=True, normalized=False) for text in specials],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    # The markup must not leak into merges, or a plain "<" would depend on it.
    marks = re.compile("|".join(re.escape(token) for token in specials))
    pieces = (piece for text in texts for piece in marks.split(text) if piece)
    tokenizer.train_from_iterator(pieces, trainer)
    # A trainer makes every token that it is given special; the markup must stay visible in decoded text.
    content = json.loads(tokenizer.to_str())
    for token in content["added_tokens"]:
        token["special"] = token["content"] in controls
    return json.dumps(content, ensure_ascii=False).encode()


def build(texts: Iterable[str] = (), vocab_size: int = 384) -> TokenizerFiles:
    """Returns files of a small ChatML model: a tokenizer trained on `texts`, our template, `<|im_end|>` as the stop."""
    tokenizer_json = train_tokenizer(texts, vocab_size)
    return TokenizerFiles(
        tokenizer_json=tokenizer_json,
        chat_template=chat_template(),
        stop_token_ids=(SPECIAL_TOKENS.index(TURN_END),),
        special_tokens={"eos_token": TURN_END, "pad_token": END_OF_TEXT},
    )


def bytewise(text: str) -> list[int]:
    """Encodes `text` for any tokenizer built here, with one id per byte and per special token.

    Valid ids that decode to `text`, but not those that the tokenizer itself would choose: ids that a model may sample.
    """
    ids: list[int] = []
    for piece in _SPECIAL.split(text):
        if piece in SPECIAL_TOKENS:
            ids.append(SPECIAL_TOKENS.index(piece))
        else:
            ids.extend(_BYTE_IDS[byte] for byte in piece.encode())
    return ids
