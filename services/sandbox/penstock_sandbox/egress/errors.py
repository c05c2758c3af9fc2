"""Why the proxy refused a request: a reason, a status and a sentence that programs in a sandbox can read."""

from __future__ import annotations

from typing import Final

REFUSED: Final = 403
"""Status of refusals by policy: clients of package indexes repeat 5xx, and take 404 for an absent package."""


_MOST_PHRASE: Final = 200


class Refusal(Exception):
    """A request that the proxy does not answer from upstream or from a recording.

    ``message`` is for programs in the sandbox: it says nothing of the operator's machines and settings.
    """

    def __init__(self, reason: str, message: str, status: int = REFUSED) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.status = status

    @property
    def phrase(self) -> bytes:
        """The reason phrase of the response: of a refused CONNECT, clients print nothing else."""
        return f"{self.reason}: {self.message}".encode("ascii", "replace")[:_MOST_PHRASE]


class Misused(Exception):
    """A connection that does not speak HTTP as it must: it is closed after one response, if any."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.refusal = Refusal("BAD_REQUEST", message, 400)
