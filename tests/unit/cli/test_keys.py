"""Keys of a terminal: however its bytes come in, they are the keys that were pressed."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from typing import TextIO

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rich.console import Console

from penstock.cli.terminal.keys import Keys
from penstock.cli.terminal.screen import Screen

NAMED = {
    b"\x1b[A": "up", b"\x1bOB": "down", b"\x1b[C": "right", b"\x1bOD": "left", b"\x1b[1~": "home", b"\x1b[F": "end",
    b"\x1b[5~": "pageup", b"\x1b[6~": "pagedown", b"\t": "tab", b"\r": "enter", b" ": "space", b"\x7f": "backspace",
}  # fmt: skip
NAMELESS = [b"\x1b[15~", b"\x1b[1;5A", b"\x1bOP", b"\x1b[?1;2c", b"\x1b[200~"]
keys = st.one_of(
    st.sampled_from(sorted(NAMED.items())),
    st.sampled_from(NAMELESS).map(lambda sent: (sent, "")),
    st.characters(codec="utf-8", exclude_characters="\x1b\t\r\n \x7f").map(lambda letter: (letter.encode(), letter)),
    # Before another escape byte, as before a letter, it was a key of its own.
    st.sampled_from(sorted(NAMED.items())[-3:]).map(lambda key: (b"\x1b" + key[0], f"escape {key[1]}")),
)


def names(pressed: list[tuple[bytes, str]]) -> list[str]:
    """Of those that have one."""
    return [name for _, told in pressed for name in ([told] if len(told) == 1 else told.split())]


@given(st.lists(keys, max_size=8), st.data())
@example([(b"\x1b[A", "up"), ("\N{LATIN SMALL LETTER E WITH ACUTE}".encode(), "\xe9")], None)
def test_keys_are_the_same_however_their_bytes_are_divided(
    pressed: list[tuple[bytes, str]], data: st.DataObject | None
) -> None:
    """A connection hands over what it has: a byte at a time, or ten keys in one piece."""
    sent = b"".join(each for each, _ in pressed)
    places = st.lists(st.integers(0, len(sent)), max_size=len(sent))
    cuts = range(len(sent)) if data is None else sorted(data.draw(places))
    reader, found = Keys(), list[str]()
    for begin, end in zip([0, *cuts], [*cuts, len(sent)], strict=True):
        found += reader.read(sent[begin:end])
    assert found == names(pressed)
    assert not reader.may_be_escape and reader.nothing_followed() == []


def test_an_escape_byte_is_a_key_once_nothing_followed() -> None:
    """And only then; what has begun otherwise goes on to wait."""
    reader = Keys()
    assert (reader.read(b"q\x1b"), reader.may_be_escape) == (["q"], True)
    assert (reader.nothing_followed(), reader.may_be_escape) == (["escape"], False)
    assert reader.read(b"[") == ["["]
    for begun in (b"\x1b[", b"\x1bO", b"\x1b[1;", b"\xe2\x82"):
        assert (reader.read(begun), reader.may_be_escape, reader.nothing_followed()) == ([], False, [])
        assert reader.read(b"\x1b[A")[-1] == "up"


@given(st.lists(st.binary(max_size=100), max_size=5))
def test_bytes_that_are_no_keys_hold_nothing_up(noise: list[bytes]) -> None:
    """What somebody pastes, or a broken terminal sends: at most a key is kept, and later ones are read."""
    reader = Keys()
    for piece in noise:
        reader.read(piece)
        assert len(reader._begun) < 64
    reader.read(b"~~~~")
    assert reader.read(b"\x1b[B") == ["down"]


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[int, TextIO]]:
    """The far end of a terminal that this process reads its keys from, and the near one."""
    far, near = os.openpty()
    with os.fdopen(far, "wb", buffering=0), os.fdopen(near, closefd=False) as keyboard, os.fdopen(near, "w") as screen:
        monkeypatch.setattr("sys.stdin", keyboard)
        yield far, screen


async def test_key_arriving_byte_by_byte_is_not_escape(terminal: tuple[int, TextIO]) -> None:
    """An arrow over a slow connection does not quit what takes escape for that."""
    far, near = terminal
    async with Screen(Console(file=near, force_terminal=True), escape_s=3600.0) as screen:
        for byte in b"\x1b[A\x1bOB\xc3\xa9q":
            os.write(far, bytes([byte]))
            await asyncio.sleep(0)  # each is a read of its own, or not: it makes no difference
        assert [await screen.key() for _ in range(4)] == ["up", "down", "\xe9", "q"]


async def test_a_lone_escape_is_that_key_when_nothing_follows(terminal: tuple[int, TextIO]) -> None:
    """Pressed by a person."""
    far, near = terminal
    async with Screen(Console(file=near, force_terminal=True), escape_s=0.0) as screen:
        os.write(far, b"\x1b")
        assert await screen.key() == "escape"
        os.write(far, b"\x1b[B")
        assert await screen.key() == "down"
