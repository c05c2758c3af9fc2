"""An S3 server (moto) whose objects outlive a `kill -9`: `python -m tests.support.endpoints.s3_server HOST PORT FILE`.

moto has all in memory. So each change that it accepted is in FILE before it is answered, and is made again at the next
start. Not for multipart uploads, whose ids would be others then.
"""

from __future__ import annotations

import pickle
import sys
import threading
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any, Final

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from werkzeug.serving import run_simple
from werkzeug.test import run_wsgi_app

_READS: Final = ("GET", "HEAD")


class Kept:
    """An application of WSGI, with its accepted changes in a file."""

    def __init__(self, application: Any, file: Path) -> None:
        self._application = application
        self._one_at_a_time = threading.Lock()
        known = list(_changes(file))
        for environ, body in known:
            self._asked(environ, body)
        file.write_bytes(b"".join(map(pickle.dumps, known)))  # without the part of one that the kill left
        self._file = file.open("ab", buffering=0)

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Any:
        """See PEP 3333."""
        if environ["REQUEST_METHOD"] in _READS:
            return self._application(environ, start_response)
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        plain = {name: value for name, value in environ.items() if isinstance(value, str | int | tuple | dict)}
        with self._one_at_a_time:
            answer, status, headers = self._asked(plain, body)
            if status.startswith("2"):
                self._file.write(pickle.dumps((plain, body)))
        start_response(status, headers.to_wsgi_list())
        return answer

    def _asked(self, environ: dict[str, Any], body: bytes) -> tuple[Any, str, Any]:
        given = {**environ, "wsgi.input": BytesIO(body), "wsgi.errors": sys.stderr}
        return run_wsgi_app(self._application, given, buffered=True)


def _changes(file: Path) -> Iterator[tuple[dict[str, Any], bytes]]:
    if not file.exists():
        return
    with file.open("rb") as stream:
        while True:
            try:
                yield pickle.load(stream)
            except (EOFError, pickle.UnpicklingError):
                return


if __name__ == "__main__":
    kept = Kept(DomainDispatcherApplication(create_backend_app), Path(sys.argv[3]))
    run_simple(sys.argv[1], int(sys.argv[2]), kept, threaded=True, request_handler=MotoRequestHandler)
