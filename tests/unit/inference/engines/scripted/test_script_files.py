"""A script is a file of bounded size and bounded content; what is none is refused by its reason (R23)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from penstock_chassis.errors import FailedPrecondition, InvalidArgument
from penstock_inference.engines.scripted.script import MAX_BYTES, MAX_NODES, Script, read_script
from penstock_inference.weights import model_files
from penstock_inference.weights.model_files import TokenizerDirectory


@pytest.mark.requirement("R23")
def test_a_script_is_read_up_to_its_limit(tmp_path: Path) -> None:
    """The byte at which it ends counts; a sparse file of terabytes is refused as one of a byte more is."""
    path = tmp_path / "turns.yaml"
    path.write_bytes(b" " * MAX_BYTES)
    assert len(read_script(path)) == MAX_BYTES
    for size in (MAX_BYTES + 1, 8 << 40):
        os.truncate(path, size)
        with pytest.raises(FailedPrecondition, match="more than") as caught:
            read_script(path)
        assert caught.value.reason == "SCRIPT_UNREADABLE"


@pytest.mark.requirement("R23")
def test_invalid_script_file_is_refused(tmp_path: Path) -> None:
    """A pipe that nobody writes to keeps no start waiting."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "bytes").write_bytes(b"\xff")
    for path in (tmp_path / "pipe", tmp_path / "bytes", tmp_path, tmp_path / "absent", Path("/dev/zero")):
        with pytest.raises(FailedPrecondition) as caught:
            read_script(path)
        assert caught.value.reason == "SCRIPT_UNREADABLE" and path.name in caught.value.message


@pytest.mark.requirement("R23")
@pytest.mark.parametrize(
    "text",
    [
        "turns: [" + "{reply: x}," * MAX_NODES + "]",
        "a: &a [x,x,x,x,x,x,x,x,x,x]\n"
        + "".join(f"{to}: &{to} [{','.join([f'*{of}'] * 10)}]\n" for of, to in zip("abcdefgh", "bcdefghi", strict=True))
        + "turns: *i",
        "turns: &a [*a]",
        "turns: " + "[" * 10_000 + "]" * 10_000,
    ],
    ids=["many", "aliases of aliases", "one within itself", "deep"],
)
def test_a_script_that_unfolds_without_bound_is_refused(text: str) -> None:
    """Before anything is made of it."""
    with pytest.raises(InvalidArgument, match="has more than") as caught:
        Script.parse(text)
    assert caught.value.reason == "SCRIPT_INVALID"


def test_a_script_may_name_a_turn_and_repeat_it() -> None:
    """Aliases are for people."""
    made = Script.parse(
        "turns: [&one {reply: x, when: {prompt_lacks: &t [a, b]}}, *one, {reply: y, when: {prompt_contains: *t}}]"
    )
    assert [turn.reply for turn in made.turns] == ["x", "x", "y"]


@pytest.mark.requirement("R23")
def test_a_models_files_are_read_up_to_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its reason, and not by what the machine's memory does."""
    monkeypatch.setattr(model_files, "MAX_FILE_BYTES", 10)
    (tmp_path / "tokenizer.json").write_bytes(b"x" * 10)
    assert TokenizerDirectory.read(tmp_path).files == {"tokenizer.json": b"x" * 10}
    (tmp_path / "tokenizer.json").write_bytes(b"x" * 11)
    with pytest.raises(FailedPrecondition) as caught:
        TokenizerDirectory.read(tmp_path)
    assert caught.value.reason == "MODEL_UNREADABLE"
