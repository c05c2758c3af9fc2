"""The first program of a sandbox's pod: waits for a sandbox service to adopt the pod, then does what that one asks.

Purpose: a pod of a warm pool runs before anybody claims it. So it starts with this program, which has nothing of a
claim: the template's ConfigMap holds it, and a Secret the pod's certificate and the service's. A service that claims
the pod connects to the pod's address and gives it a key pair made for this claim alone. From then on every connection
needs that one, at both ends. Over these the service prepares the sandbox and starts the guest, so that the guest is
always the service's version.

It is one file for Python 3.8 or newer and the standard library, and changes rarely: pods of a warm pool may be older
than the service.

Invariants
- Every connection is TLS 1.3 with certificates at both ends. Before the adoption these are the template's: the pod's
  key cannot stand for a service, and a pod holds no service's key.
- A pod is adopted once. The claim's key is in memory and, while it is loaded, in a file of root's.
- It runs as root and what it starts for an agent as another user, who can neither read its keys nor signal it.
- The first process only waits: it reaps orphans, and ends the pod at once on SIGTERM, or when the rest has ended.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import ssl
import sys
import tempfile
from typing import Any, Dict, Optional

VERSION = 1
PORT = 7790
NO_GUEST = "NO_GUEST"

_LINE = 4 * 1024 * 1024
_PIECE = 64 * 1024
_OUTPUT = 1024 * 1024
_ATTACH = b"attach\n"
_HANDSHAKE_S = 20.0
_DRAIN_S = 2.0


def context(cert: str, peer: str) -> ssl.SSLContext:
    """Returns a server's context: `cert` is a file with its certificate and key, `peer` one with the only client's."""
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    made.minimum_version = ssl.TLSVersion.TLSv1_3
    made.load_cert_chain(cert)
    made.load_verify_locations(peer)
    made.verify_mode = ssl.CERT_REQUIRED
    return made


class Server:
    """Listens at one address; `folder` holds `pod.pem` and `service.crt`."""

    def __init__(self, folder: str, listener: Any) -> None:
        self._listener = listener
        self._template = context(os.path.join(folder, "pod.pem"), os.path.join(folder, "service.crt"))
        self._server: Optional[asyncio.AbstractServer] = None
        self._adopted = False

    async def start(self) -> None:
        """Serves with the template's keys."""
        self._server = await self._serve(self._template)

    async def _serve(self, keys: ssl.SSLContext) -> asyncio.AbstractServer:
        return await asyncio.start_server(
            lambda reader, writer: self._connection(keys, reader, writer),
            sock=self._listener.dup(),
            ssl=keys,
            ssl_handshake_timeout=_HANDSHAKE_S,
            limit=_LINE,
        )

    async def _connection(
        self, keys: ssl.SSLContext, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        try:
            line = await reader.readline()
            if not line:
                return
            request = json.loads(line.decode())
            if keys is self._template:
                await self._adopt(request, writer)
            else:
                await _OPERATIONS[request["op"]](request, reader, writer)
        except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
            # A failed request ends its connection and nothing else.
            _answer(writer, {"error": "%s: %s" % (type(error).__name__, error)})
        finally:
            writer.close()

    async def _adopt(self, request: Dict[str, Any], writer: asyncio.StreamWriter) -> None:
        if request["op"] != "adopt" or self._adopted or self._server is None:
            raise ValueError("this pod has been adopted" if self._adopted else "not adopted yet")
        with tempfile.NamedTemporaryFile() as file:  # mode 0600
            file.write(request["claim"].encode())
            file.flush()
            keys = context(file.name, file.name)
        self._adopted = True
        before, self._server = self._server, await self._serve(keys)
        before.close()
        _answer(writer, _identity())
        await writer.drain()


def _identity() -> Dict[str, Any]:
    return {"version": VERSION, "pod": os.environ.get("POD_NAME", "")}


def _answer(writer: asyncio.StreamWriter, message: Dict[str, Any]) -> None:
    writer.write(json.dumps(message).encode() + b"\n")


# What an adopted pod does ------------------------------------------------------------------------------------------


async def _hello(_: Dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    _answer(writer, _identity())
    await writer.drain()


async def _run(request: Dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Runs a command to its end, or until the service hangs up."""
    process = await asyncio.create_subprocess_exec(
        *request["argv"],
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    working = asyncio.ensure_future(_communicate(process, request.get("stdin", "").encode()))
    hung_up = asyncio.ensure_future(reader.read(1))
    await asyncio.wait({working, hung_up}, return_when=asyncio.FIRST_COMPLETED)
    if not working.done():
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    out, err = await working
    hung_up.cancel()
    code = process.returncode
    _answer(
        writer,
        {
            "code": code if code is not None and code >= 0 else -1,
            "stdout": out.decode(errors="replace"),
            "stderr": err.decode(errors="replace"),
        },
    )
    await writer.drain()


async def _communicate(process: Any, stdin: bytes) -> Any:
    async def feed() -> None:
        try:
            process.stdin.write(stdin)
            await process.stdin.drain()
        except OSError:
            pass  # it does not read
        process.stdin.close()

    reading = [asyncio.ensure_future(_read(stream)) for stream in (process.stdout, process.stderr)]
    feeding = asyncio.ensure_future(feed())
    await process.wait()
    # What it left in the background may hold the pipes open.
    await asyncio.wait(reading, timeout=_DRAIN_S)
    feeding.cancel()
    for one in reading:
        one.cancel()
    return [bytes(one.result()) if one.done() and not one.cancelled() else b"" for one in reading]


async def _read(stream: asyncio.StreamReader) -> bytes:
    kept = bytearray()
    while True:
        data = await stream.read(_PIECE)
        if not data:
            return bytes(kept)
        kept += data[: max(0, _OUTPUT - len(kept))]


async def _put(request: Dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Writes a file, which is there once all of it has come."""
    partial = request["path"] + ".partial"
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o700)
    try:
        with os.fdopen(descriptor, "wb") as file:
            left = int(request["size"])
            while left:
                data = await reader.read(min(_PIECE, left))
                if not data:
                    raise EOFError("the file ended early")
                file.write(data)
                left -= len(data)
        os.replace(partial, request["path"])
    except BaseException:
        os.unlink(partial)
        raise
    _answer(writer, {})
    await writer.drain()


async def _get(request: Dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with open(request["path"], "rb") as file:
        size = os.fstat(file.fileno()).st_size
        _answer(writer, {"size": size})
        while size:
            data = file.read(min(_PIECE, size))
            if not data:
                break  # it was cut meanwhile, and the connection ends early
            writer.write(data)
            await writer.drain()
            size -= len(data)


async def _attach(request: Dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Connects with the guest's socket."""
    try:
        inner_reader, inner_writer = await asyncio.open_unix_connection(request["socket"])
    except (ConnectionRefusedError, FileNotFoundError):
        _answer(writer, {"error": NO_GUEST})
        return
    inner_writer.write(_ATTACH)
    _answer(writer, {})
    both = {
        asyncio.ensure_future(_pump(reader, inner_writer)),
        asyncio.ensure_future(_pump(inner_reader, writer)),
    }
    try:
        # Either end's is the pipe's.
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for one in both:
            one.cancel()
        inner_writer.close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while True:
            data = await reader.read(_PIECE)
            if not data:
                return
            writer.write(data)
            await writer.drain()
    except OSError:
        return


_OPERATIONS = {"hello": _hello, "run": _run, "put": _put, "get": _get, "attach": _attach}


# The pod -----------------------------------------------------------------------------------------------------------


def _listen(address: str, port: int) -> Any:
    import socket

    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((address, port))
    listener.listen(64)
    return listener


async def _serve_forever(folder: str, listener: Any) -> None:
    loop = asyncio.get_running_loop()
    # A handshake that fails is a stranger's: no traceback for it.
    loop.set_exception_handler(lambda _, what: None if isinstance(what.get("exception"), OSError) else _say(what))
    await Server(folder, listener).start()
    await loop.create_future()


def _say(what: Dict[str, Any]) -> None:
    sys.stderr.write("entrypoint: %s %r\n" % (what.get("message"), what.get("exception")))
    sys.stderr.flush()


def main() -> int:
    """Runs the pod's first process."""
    parser = argparse.ArgumentParser(description="Serves a pod for Penstock's sandbox service.")
    parser.add_argument("--keys", required=True, help="directory with pod.pem and service.crt")
    parser.add_argument("--port", type=int, default=PORT)
    given = parser.parse_args()
    address = os.environ.get("POD_IP", "")
    if os.geteuid() != 0:
        sys.stderr.write("entrypoint: the container must run as root; its programs run as an ordinary user\n")
        return 1
    if not address:
        sys.stderr.write("entrypoint: POD_IP is not set: it must be the pod's status.podIP\n")
        return 1
    listener = _listen(address, given.port)
    server = os.fork()
    if server == 0:
        asyncio.run(_serve_forever(given.keys, listener))
        return 1
    listener.close()
    for number in (signal.SIGTERM, signal.SIGINT):
        # With the first process the kernel ends all others.
        signal.signal(number, lambda *_: os._exit(0))
    while True:
        pid, _ = os.wait()
        if pid == server:
            return 1


if __name__ == "__main__":
    sys.exit(main())
