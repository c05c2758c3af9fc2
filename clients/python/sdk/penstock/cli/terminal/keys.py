"""Decodes a terminal's key sequences to names.

Invariant: the result does not depend on how the bytes were split among reads. An incomplete sequence is kept until it
is complete; only a lone escape byte, which is a key by itself and the beginning of most others, needs a timeout by the
caller.
"""

import re
from typing import Final

ESCAPE_S: Final = 0.05
"""Seconds to wait for the rest of a key after its escape byte: longer than the gaps between a connection's packets,
shorter than between two key presses."""

_KEY: Final = re.compile(
    rb"\x1b\[[0-?]*[ -/]*[@-~]"  # ECMA-48's control sequences
    rb"|\x1bO[ -~]"  # the same keys in application mode
    rb"|\x1b"
    rb"|[\xc2-\xdf][\x80-\xbf]|[\xe0-\xef][\x80-\xbf]{2}|[\xf0-\xf4][\x80-\xbf]{3}"
    rb"|.",
    re.DOTALL,
)
_BEGUN: Final = re.compile(
    rb"\x1b(?:\[[0-?]*[ -/]*|O)?|[\xc2-\xdf]|[\xe0-\xef][\x80-\xbf]?|[\xf0-\xf4][\x80-\xbf]{0,2}"
)
_MOST: Final = 64
"""Maximum bytes of a key; a longer sequence is none."""
_NAMES: Final = {
    b"\x1b[A": "up", b"\x1bOA": "up", b"\x1b[B": "down", b"\x1bOB": "down",
    b"\x1b[C": "right", b"\x1bOC": "right", b"\x1b[D": "left", b"\x1bOD": "left",
    b"\x1b[H": "home", b"\x1bOH": "home", b"\x1b[1~": "home", b"\x1b[F": "end", b"\x1bOF": "end", b"\x1b[4~": "end",
    b"\x1b[5~": "pageup", b"\x1b[6~": "pagedown", b"\x1b": "escape", b"\t": "tab", b"\r": "enter", b"\n": "enter",
    b" ": "space", b"\x7f": "backspace",
}  # fmt: skip


class Keys:
    """Decodes keys from bytes as they come."""

    def __init__(self) -> None:
        self._begun = b""

    @property
    def may_be_escape(self) -> bool:
        """Whether the last byte was an escape byte: the escape key, if nothing follows."""
        return self._begun == b"\x1b"

    def read(self, data: bytes) -> list[str]:
        """Returns the keys completed by `data`: characters, and names of others. Keys without a name are left out."""
        data, self._begun = self._begun + data, b""
        found: list[str] = []
        at = 0
        while at < len(data):
            if len(data) - at < _MOST and _BEGUN.fullmatch(data, at):
                self._begun = data[at:]
                break
            key = _KEY.match(data, at)
            assert key is not None, "its last alternative takes any byte"
            at = key.end()
            name = _NAMES.get(key[0])
            if name is None and not key[0].startswith(b"\x1b"):
                name = key[0].decode("utf-8", "replace")
            if name is not None:
                found.append(name)
        return found

    def nothing_followed(self) -> list[str]:
        """Returns the escape key, if its byte was the last. Call it after the timeout."""
        if not self.may_be_escape:
            return []
        self._begun = b""
        return ["escape"]
