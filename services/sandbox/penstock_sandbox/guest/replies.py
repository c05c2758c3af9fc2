"""The reply to one request: sent exactly once, when its result is known."""

from __future__ import annotations

import errno
from typing import Callable

from penstock_sandbox.guest import frames


class Reply:
    """Replies to the request with this number."""

    def __init__(self, send_frame: Callable[[int, int, bytes], None], request: int) -> None:
        self._send_frame = send_frame
        self._request = request
        self.given = False

    def answer(self, message: frames.Message) -> None:
        """Reports success."""
        if not self.given:
            self.given = True
            self._send_frame(frames.REPLY, self._request, frames.pack_message(message))

    def refuse(self, number: int, what: str, *, failed: bool = False) -> None:
        """Reports the kernel's errno and the operation. ``failed``: the program could not be executed."""
        refusal: frames.Message = {"errno": number or errno.EIO, "what": what[:1000]}
        if failed:
            refusal["failed"] = True
        self.answer(refusal)
