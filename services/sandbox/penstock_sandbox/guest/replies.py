"""The reply to one request: sent exactly once, when its result, or that of all its parts, is known."""

from __future__ import annotations

import errno
from typing import Callable, Optional

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


class SharedReply(Reply):
    """The reply to a request of at least one part: sent when each part has replied; the first refusal prevails."""

    def __init__(self, whole: Reply, parts: int) -> None:
        self._whole = whole
        self._missing = parts
        self._refusal: Optional[frames.Message] = None

    def answer(self, message: frames.Message) -> None:
        """Reports one part's result; called once for each."""
        if "errno" in message and self._refusal is None:
            self._refusal = message
        self._missing -= 1
        if self._missing == 0:
            self._whole.answer(self._refusal or {})
