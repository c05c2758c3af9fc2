"""A pod that this service has adopted, over TLS to its address: commands, files, and pipes to its guest.

Purpose: the other end of ``entrypoint``. Each request has a connection of its own, with the claim's key at both ends.

Invariants
- A pod is adopted with the template's keys, and only if it says the name that the cluster has for it: an address may
  have passed to another pod.
- Adopting is repeated until the deadline and harmless if its answer was lost: a pod that knows the claim's key is
  adopted by this claim.
- What the pod answers is bounded: it runs beside an untrusted workload.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from penstock_chassis.aio.retry import Delays, retry
from penstock_chassis.errors import FailedPrecondition, Unavailable
from penstock_sandbox.backends.guest_client.pipe import Pipe, SandboxGone, StreamPipe
from penstock_sandbox.backends.kubernetes import entrypoint
from penstock_sandbox.backends.kubernetes.keys import ClaimKey
from penstock_sandbox.backends.remote_machine.machine import Outcome

_CONNECT_S: Final = 10.0
_ADOPT_S: Final = 30.0
_COMMAND_S: Final = 60.0
_TRANSFER_S: Final = 900.0
_LINE: Final = 4 * 1024 * 1024
_PIECE: Final = 256 * 1024
_DELAYS: Final = Delays(0.05, 1.0)


@dataclass(frozen=True, slots=True)
class Address:
    """Where a pod listens."""

    host: str
    port: int


class AdoptedPod:
    """See the module; implements `Machine`."""

    def __init__(self, address: Address, key: ClaimKey) -> None:
        self._address = address
        self._key = key

    # Adopting ----------------------------------------------------------------------------------------------------

    @classmethod
    async def adopt(cls, address: Address, template_keys: ssl.SSLContext, key: ClaimKey, name: str) -> AdoptedPod:
        """Gives the pod called `name` the claim's key. Raises Unavailable or FailedPrecondition (TEMPLATE_UNSUITABLE).

        Raises Unavailable (CREATE_FAILED) also for a pod with another name.
        """
        pod = cls(address, key)

        async def once() -> None:
            try:
                reply = await pod._say(template_keys, {"op": "adopt", "claim": key.pem})
            except ssl.SSLCertVerificationError:
                # Not the template's certificate: the claim's, where an earlier answer was lost, or a stranger's.
                reply = await pod._say(key.context, {"op": "hello"})
            if reply.get("version") != entrypoint.VERSION:
                raise FailedPrecondition(
                    f"the template's entrypoint has version {reply.get('version')!r}, this service needs "
                    f"{entrypoint.VERSION}: apply the manifests of this version and recreate the warm pool",
                    reason="TEMPLATE_UNSUITABLE",
                )
            if reply.get("pod") != name:
                raise Unavailable(
                    "another pod answers at the sandbox's address", reason="CREATE_FAILED", retry_after_s=1.0
                )

        def patience(error: Exception) -> float:
            passing = isinstance(error, OSError | EOFError) and not isinstance(error, ssl.SSLCertVerificationError)
            return _ADOPT_S if passing else 0.0

        try:
            await retry(once, _DELAYS, patience_s=patience)
        except ssl.SSLError as error:
            raise FailedPrecondition(
                "the pod and this service do not know each other's certificates: kubernetes_keys and the template's "
                f"Secret must be of one set, and pods of the warm pool younger than it ({error.reason})",
                reason="TEMPLATE_UNSUITABLE",
            ) from None
        except (OSError, EOFError) as error:
            raise _unreachable(error) from error
        return pod

    # The machine -------------------------------------------------------------------------------------------------

    async def run(self, argv: list[str], stdin: str = "", *, timeout_s: float | None = None) -> Outcome:
        """See `Machine`; 1 MiB of output at most."""
        reply = await self._ask({"op": "run", "argv": argv, "stdin": stdin}, timeout_s or _COMMAND_S)
        return Outcome(int(reply["code"]), str(reply["stdout"]), str(reply["stderr"]))

    async def upload(self, path: str, content: bytes) -> None:
        """See `Machine`."""
        try:
            async with (
                asyncio.timeout(_COMMAND_S),
                self._connected(self._key.context, {"op": "put", "path": path, "size": len(content)}) as (
                    reader,
                    writer,
                ),
            ):
                writer.write(content)
                await writer.drain()
                await _answer(reader)
        except (OSError, EOFError, ValueError) as error:
            raise _unreachable(error) from error

    async def send(self, source: Path, path: str) -> None:
        """See `Machine`."""
        try:
            with await asyncio.to_thread(source.open, "rb") as file:
                size = await asyncio.to_thread(lambda: source.stat().st_size)
                async with (
                    asyncio.timeout(_TRANSFER_S),
                    self._connected(self._key.context, {"op": "put", "path": path, "size": size}) as (reader, writer),
                ):
                    while data := await asyncio.to_thread(file.read, _PIECE):
                        writer.write(data)
                        await writer.drain()
                    await _answer(reader)
        except (OSError, EOFError, ValueError) as error:
            raise _unreachable(error) from error

    async def fetch(self, path: str, target: Path) -> None:
        """See `Machine`."""
        partial = target.with_name(target.name + ".partial")
        try:
            async with (
                asyncio.timeout(_TRANSFER_S),
                self._connected(self._key.context, {"op": "get", "path": path}) as (reader, _),
            ):
                left = int((await _answer(reader))["size"])
                with await asyncio.to_thread(partial.open, "wb") as file:
                    while left:
                        data = await reader.read(min(_PIECE, left))
                        if not data:
                            raise EOFError("the file ended early")
                        await asyncio.to_thread(file.write, data)
                        left -= len(data)
            await asyncio.to_thread(partial.replace, target)
        except (OSError, EOFError, ValueError, KeyError) as error:
            raise _unreachable(error) from error
        finally:
            await asyncio.to_thread(partial.unlink, missing_ok=True)

    async def attach(self, socket: str) -> Pipe:
        """Opens a pipe to the guest. Raises SandboxGone if it has ended, OSError or EOFError if the pod is silent."""
        async with asyncio.timeout(_CONNECT_S):
            reader, writer = await self._connect(self._key.context)
            try:
                _write(writer, {"op": "attach", "socket": socket})
                reply = json.loads(await _line(reader))
            except BaseException:
                writer.transport.abort()
                raise
        if reply.get("error") == entrypoint.NO_GUEST:
            writer.transport.abort()
            raise SandboxGone("ATTENDANT_ENDED")
        if reply.get("error"):
            writer.transport.abort()
            raise OSError("the pod did not attach its guest")
        return StreamPipe(reader, writer)

    # Connections -------------------------------------------------------------------------------------------------

    async def _ask(self, request: dict[str, Any], within_s: float) -> dict[str, Any]:
        try:
            async with asyncio.timeout(within_s + _CONNECT_S):
                return await self._say(self._key.context, request)
        except (OSError, EOFError, ValueError) as error:
            raise _unreachable(error) from error

    async def _say(self, keys: ssl.SSLContext, request: dict[str, Any]) -> dict[str, Any]:
        async with self._connected(keys, request) as (reader, _):
            return await _answer(reader)

    @asynccontextmanager
    async def _connected(
        self, keys: ssl.SSLContext, request: dict[str, Any]
    ) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        reader, writer = await self._connect(keys)
        try:
            _write(writer, request)
            yield reader, writer
        finally:
            writer.transport.abort()

    async def _connect(self, keys: ssl.SSLContext) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        async with asyncio.timeout(_CONNECT_S):
            return await asyncio.open_connection(self._address.host, self._address.port, ssl=keys, limit=_LINE)


def _write(writer: asyncio.StreamWriter, message: dict[str, Any]) -> None:
    writer.write(json.dumps(message).encode() + b"\n")


async def _line(reader: asyncio.StreamReader) -> bytes:
    line = await reader.readline()
    if not line.endswith(b"\n"):
        raise EOFError("the pod hung up")
    return line


async def _answer(reader: asyncio.StreamReader) -> dict[str, Any]:
    """Returns the pod's answer. Raises OSError for a refusal, EOFError or ValueError for none."""
    reply = json.loads(await _line(reader))
    if not isinstance(reply, dict):
        raise ValueError("the pod answers something else")
    if reply.get("error"):
        raise OSError(str(reply["error"])[:300])
    return reply


def _unreachable(error: Exception) -> Unavailable:
    why = str(error) or type(error).__name__
    return Unavailable(
        f"the sandbox's pod does not answer ({why}): this service must be able to connect to pods of the template "
        "(its networkPolicy's ingress)",
        reason="CREATE_FAILED",
        retry_after_s=1.0,
    )
