"""Why a server outside gave no answer: a sentence for callers, and the cause for the log.

Invariant: neither has a login, and callers get no address. The HTTP client's own texts have both, that of the service's
proxy among them.
"""

from __future__ import annotations

import re
import ssl
from typing import Final

_LOGIN: Final = re.compile(r"[^\s'\"/(]*@")


def why(error: BaseException) -> str:
    """Returns what to say after the server's name."""
    import aiohttp  # a tenth of a second of each start, for what few services need

    match error:
        case TimeoutError():
            return "does not answer in time"
        case aiohttp.ClientHttpProxyError() | aiohttp.ClientProxyConnectionError():
            return "cannot be reached through the service's proxy"
        case aiohttp.ClientConnectorCertificateError() | ssl.SSLCertVerificationError():
            return "has no valid certificate"
        case aiohttp.ClientConnectorDNSError():
            return "has no address"
        case aiohttp.ClientPayloadError():
            return "ends its answer early"
        case aiohttp.ClientConnectionError() | OSError():
            return "cannot be reached"
        case _:
            return "gave no valid answer"


def for_log(error: BaseException) -> str:
    """Returns the error's class and text, without users and passwords of the addresses in it."""
    return f"{type(error).__name__}: {_LOGIN.sub('', str(error))}"
