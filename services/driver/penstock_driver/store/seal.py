"""Seals what the journal has of secrets: specs of rollouts and requests of terminal episodes that have not ended.

Invariants: nothing is sealed without a key of 256 bits. What is sealed for one id cannot be opened for another. The key
file is readable by the service's user alone.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from penstock_chassis.errors import FailedPrecondition

KEY_FILE: Final = "journal.key"
MIN_KEY: Final = 32
"""Characters of a key that an operator supplies."""
_KEY_BYTES: Final = 32
_NONCE_BYTES: Final = 12
_NAME_BYTES: Final = 4
_FORMAT: Final = b"\x01"


class SealBroken(Exception):
    """Sealed data cannot be opened: it was sealed with another key or for another id, or it was changed."""


class Seal:
    """Seals with the first key, and opens with any of them."""

    def __init__(self, keys: Sequence[bytes]) -> None:
        """`keys` have 32 bytes each; at least one."""
        self._keys = {_name(key): AESGCM(key) for key in reversed(keys)}
        self._first = _name(keys[0])

    @classmethod
    def of(cls, directory: Path, given: str = "") -> Seal:
        """The seal of a service whose state is in `directory`.

        `given` has the operator's keys, separated by commas. Without one, the key is in the file `journal.key` there,
        which is made if it is absent. A file that is there opens what was sealed before keys were given.

        Raises FailedPrecondition: KEY_FILE_EXPOSED when others may read the file, KEY_FILE_UNUSABLE when it cannot be
        read or made.
        """
        keys = [hashlib.sha256(b"penstock journal\0" + key.encode()).digest() for key in split(given)]
        path = directory / KEY_FILE
        try:
            kept = _read(path)
            if kept is None and not keys:
                kept = _made(path)
        except OSError as error:
            message = f"{path} cannot be read or made: {error.strerror}; check the directory, or set journal_key"
            raise FailedPrecondition(message, reason="KEY_FILE_UNUSABLE") from error
        return cls([*keys, *([kept] if kept else [])])

    def seal(self, data: bytes, context: str) -> bytes:
        """Return `data` sealed for `context`, the id of what it belongs to."""
        nonce = secrets.token_bytes(_NONCE_BYTES)
        return _FORMAT + self._first + nonce + self._keys[self._first].encrypt(nonce, data, context.encode())

    def open(self, sealed: bytes, context: str) -> bytes:
        """Return what was sealed for `context`. Raises SealBroken."""
        begin = len(_FORMAT) + _NAME_BYTES
        key = self._keys.get(sealed[len(_FORMAT) : begin])
        if not sealed.startswith(_FORMAT) or key is None:
            raise SealBroken("it was sealed with a key that this driver does not have")
        nonce = sealed[begin : begin + _NONCE_BYTES]
        try:
            return key.decrypt(nonce, sealed[begin + _NONCE_BYTES :], context.encode())
        except (InvalidTag, ValueError):
            raise SealBroken("it was changed, or sealed for something else") from None


def is_sealed(data: bytes) -> bool:
    """Whether data was sealed. No serialized message begins so: it would be field 0."""
    return data.startswith(_FORMAT)


def split(given: str) -> list[str]:
    """The keys of a setting."""
    return [key for part in given.split(",") if (key := part.strip())]


def _name(key: bytes) -> bytes:
    """Distinguishes keys without revealing anything of them."""
    return hashlib.sha256(b"name of a journal key\0" + key).digest()[:_NAME_BYTES]


def _read(path: Path) -> bytes | None:
    try:
        with path.open("rb") as file:
            if stat.S_IMODE(os.fstat(file.fileno()).st_mode) & 0o077:
                message = (
                    f"others than this service may read {path}: chmod 600 it, or remove it and lose what it sealed"
                )
                raise FailedPrecondition(message, reason="KEY_FILE_EXPOSED")
            key = file.read()
    except FileNotFoundError:
        return None
    if len(key) != _KEY_BYTES:
        message = f"{path} has {len(key)} bytes and not {_KEY_BYTES}: restore it, or remove it and lose what it sealed"
        raise FailedPrecondition(message, reason="KEY_FILE_UNUSABLE")
    return key


def _made(path: Path) -> bytes:
    """Make a key. The file appears whole, and a copy that another start made first is used."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    key, temporary = secrets.token_bytes(_KEY_BYTES), path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    try:
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(key)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(temporary, path)
        except FileExistsError:
            return _read(path) or key
    finally:
        temporary.unlink(missing_ok=True)
    return key
