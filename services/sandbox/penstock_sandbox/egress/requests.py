"""A sandbox's request as the proxy understands it, checked against what its sandbox may reach (R141).

Invariants
- A request is GET or HEAD, or git's POST for a fetch: nothing that a sandbox sends changes anything upstream, whatever
  credentials the proxy adds.
- CONNECT's host, the TLS name and the Host header are one host. What is sent upstream is built anew: of the sandbox's
  headers only those in `FORWARDED` remain, so no framing and no credential of it passes.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from penstock.values.hosts import address, is_name, matches
from penstock_sandbox.egress.errors import Misused, Refusal
from penstock_sandbox.egress.greeting import Greeting

FORWARDED: Final = ("accept", "content-type", "content-encoding", "git-protocol")
"""All are in a response's key: by a header outside of it, one sandbox could choose what its siblings get."""
_TARGET: Final = re.compile(rb"[\x21-\x7e]+")
_FETCH: Final = "/git-upload-pack"
_FETCH_TYPE: Final = "application/x-git-upload-pack-request"
_PUSH: Final = "git-receive-pack"
_DEFAULT_PORTS: Final = {"http": 80, "https": 443}
MAX_URL_BYTES: Final = 16 * 1024


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a request goes. ``host`` is a name in lower case, or an address without brackets."""

    scheme: str
    host: str
    port: int

    @property
    def place(self) -> str:
        """The origin's host and port as in a URL; a scheme's default port is left out."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _DEFAULT_PORTS[self.scheme] else f"{host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Request:
    """A checked request. ``target`` begins with "/"."""

    method: str
    origin: Origin
    target: str
    headers: Mapping[str, str]
    body: bytes

    @property
    def url(self) -> str:
        """The request's URL."""
        return f"{self.origin.scheme}://{self.origin.place}{self.target}"

    def key(self) -> str:
        """Returns what a recorded response is found by: equal for equal requests."""
        parts = [self.method, self.url, *(self.headers.get(name, "") for name in FORWARDED)]
        digest = hashlib.sha256("\0".join(parts).encode())
        digest.update(b"\0" + self.body)
        return digest.hexdigest()


def connected(target: bytes, greeting: Greeting) -> Origin:
    """Returns the origin that a CONNECT asks for. Raises Misused; Refusal (HOST_NOT_ALLOWED, PORT_NOT_ALLOWED)."""
    origin = _origin("https", target.decode("ascii", "replace"), "CONNECT's target")
    check_origin(origin, greeting)
    return origin


def check_origin(origin: Origin, greeting: Greeting) -> None:
    """Raises Refusal (HOST_NOT_ALLOWED, PORT_NOT_ALLOWED)."""
    if not matches(origin.host, greeting.hosts):
        raise Refusal("HOST_NOT_ALLOWED", f"the task's list of hosts does not name {origin.host}")
    if matches(origin.host, greeting.denied_hosts):
        raise Refusal("HOST_NOT_ALLOWED", f"the task's list of denied hosts names {origin.host}")
    if origin.port not in greeting.ports:
        ports = ", ".join(map(str, greeting.ports))
        raise Refusal("PORT_NOT_ALLOWED", f"the task's list does not name port {origin.port} of {origin.host}: {ports}")


def checked(
    method: bytes, target: bytes, headers: Sequence[tuple[bytes, bytes]], inside: Origin | None, greeting: Greeting
) -> Request:
    """Returns a request without its body; ``inside`` is the origin of the CONNECT that it came in.

    Raises Misused for what is no single, unambiguous request; Refusal (HOST_NOT_ALLOWED, PORT_NOT_ALLOWED,
    METHOD_NOT_ALLOWED).
    """
    if not _TARGET.fullmatch(target) or len(target) > MAX_URL_BYTES:
        raise Misused("the request's target has a character that no URL has, or is too long")
    written = target.decode("ascii")
    if inside is None:
        scheme, colon, rest = written.partition("://")
        if not colon or scheme.lower() != "http":
            raise Misused("a request to a proxy names a whole http:// URL, or is a CONNECT")
        place, slash, path = rest.partition("/")
        origin, path = _origin("http", place, "the URL"), slash + path or "/"
        if "?" in place or "#" in place:
            raise Misused("the URL has no path")
    else:
        origin, path = inside, written
        if not path.startswith("/"):
            raise Misused("a request inside a CONNECT names a path")
    if "#" in path:
        raise Misused("the request's target has a fragment")
    named = [value for name, value in headers if name == b"host"]
    if len(named) != 1 or _origin(origin.scheme, named[0].decode("ascii", "replace"), "the Host header") != origin:
        raise Misused("the Host header and the request's target name different hosts")
    if any(name == b"transfer-encoding" for name, _ in headers) and any(
        name == b"content-length" for name, _ in headers
    ):
        raise Misused("a request has a Content-Length or a Transfer-Encoding, not both")
    check_origin(origin, greeting)
    passed = _forwarded(headers)
    _check_method(method.decode("ascii", "replace"), path, passed.get("content-type"))
    return Request(method.decode("ascii"), origin, path, passed, b"")


def _check_method(method: str, target: str, content_type: str | None) -> None:
    # A server might read an escaped or a relative path as another one. Git sends no query, and always this type.
    plain = not any(part in target for part in ("%", ";", "/.", "\\", "?"))
    fetches = method == "POST" and target.endswith(_FETCH) and plain and content_type == _FETCH_TYPE
    pushes = _PUSH in target
    if pushes or not (method in ("GET", "HEAD") or fetches):
        what = "git push" if pushes else method
        raise Refusal(
            "METHOD_NOT_ALLOWED", f"{what} is not possible: sandboxes only read, by GET, HEAD and git's fetch"
        )


def _forwarded(headers: Sequence[tuple[bytes, bytes]]) -> dict[str, str]:
    passed: dict[str, str] = {}
    for name, value in headers:
        key = name.decode("ascii")
        if key in FORWARDED:
            # A header may be split over lines; their order counts.
            written = value.decode("latin-1")
            passed[key] = f"{passed[key]}, {written}" if key in passed else written
    return passed


def _origin(scheme: str, place: str, what: str) -> Origin:
    host, colon, port = place.rpartition(":")
    if not colon or (place.startswith("[") and place.endswith("]")):
        host, port = place, str(_DEFAULT_PORTS[scheme])
    bracketed = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if bracketed else host.lower()
    found = address(host)
    is_right = found is not None and found.version == (6 if bracketed else 4) and str(found) == host and "%" not in host
    if not (is_right or (not bracketed and is_name(host))) or not (port.isascii() and port.isdigit() and len(port) < 6):
        raise Misused(f"{what} names no host and port")
    number = int(port)
    if not 0 < number < 65536:
        raise Misused(f"{what} names no port from 1 to 65535")
    return Origin(scheme, host, number)
