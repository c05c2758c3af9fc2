"""The seal of what the journal has of secrets."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock_chassis.errors import FailedPrecondition
from penstock_driver.store.seal import KEY_FILE, Seal, SealBroken, is_sealed

FIRST, SECOND = "a" * 32, "b" * 32


@pytest.mark.requirement("R8", "R127")
def test_what_is_sealed_is_read_with_its_key_and_id_alone(tmp_path: Path) -> None:
    """Not as another's, not after a change, and not without the key."""
    seal = Seal.of(tmp_path, FIRST)
    sealed = seal.seal(b"secret", "r1")
    assert is_sealed(sealed)
    assert b"secret" not in sealed
    assert seal.seal(b"secret", "r1") != sealed
    assert Seal.of(tmp_path, FIRST).open(sealed, "r1") == b"secret"
    for other, context, data in (
        (seal, "r2", sealed),
        (seal, "r1", sealed[:-1] + bytes([sealed[-1] ^ 1])),
        (seal, "r1", sealed[:10]),
        (Seal.of(tmp_path, SECOND), "r1", sealed),
    ):
        with pytest.raises(SealBroken):
            other.open(data, context)
    assert not (tmp_path / KEY_FILE).exists(), "an operator's key needs no file"


@pytest.mark.requirement("R127")
def test_keys_are_changed_without_losing_what_was_sealed(tmp_path: Path) -> None:
    """From the file to a setting, and from one setting to the next."""
    by_file = Seal.of(tmp_path).seal(b"one", "r")
    by_first = Seal.of(tmp_path, FIRST).seal(b"two", "r")
    both = Seal.of(tmp_path, f"{SECOND}, {FIRST}")
    assert (both.open(by_file, "r"), both.open(by_first, "r")) == (b"one", b"two")
    assert Seal.of(tmp_path, SECOND).open(both.seal(b"three", "r"), "r") == b"three"


@pytest.mark.requirement("R8")
def test_key_file_is_made_once_and_for_its_owner_alone(tmp_path: Path) -> None:
    """It is refused if others may read it, or if it is not whole."""
    sealed = Seal.of(tmp_path / "state").seal(b"x", "r")
    key = tmp_path / "state" / KEY_FILE
    assert key.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in key.parent.iterdir()] == [KEY_FILE]
    assert Seal.of(tmp_path / "state").open(sealed, "r") == b"x"
    key.chmod(0o640)
    with pytest.raises(FailedPrecondition) as exposed:
        Seal.of(tmp_path / "state")
    assert exposed.value.reason == "KEY_FILE_EXPOSED"
    key.chmod(0o600)
    key.write_bytes(b"short")
    with pytest.raises(FailedPrecondition) as unusable:
        Seal.of(tmp_path / "state")
    assert unusable.value.reason == "KEY_FILE_UNUSABLE"
