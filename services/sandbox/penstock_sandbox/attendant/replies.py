"""The answer to one request: given exactly once, whenever it is known."""

from __future__ import annotations

import errno
from typing import Callable

from penstock_sandbox.attendant import frames


class Reply:
    """Answers the request with this number."""

    def __init__(self, say: Callable[[int, int, bytes], None], request: int) -> None:
        self._say = say
        self._request = request
        self.given = False

    def answer(self, message: frames.Message) -> None:
        """It was done."""
        if not self.given:
            self.given = True
            self._say(frames.REPLY, self._request, frames.pack_message(message))

    def refuse(self, number: int, what: str, *, failed: bool = False) -> None:
        """It was not: the kernel's number and what was being done. ``failed``: the program could not be executed."""
        refusal: frames.Message = {"errno": number or errno.EIO, "what": what[:1000]}
        if failed:
            refusal["failed"] = True
        self.answer(refusal)
