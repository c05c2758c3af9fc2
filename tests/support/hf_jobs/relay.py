"""Runs a job's command inside its sandbox, and leads from a Unix socket to the port that it listens on. Another socket
beside it, whose name ends with `.up`, tells whether the port accepts: one byte, `1` or `0`.

Standard library only. It ends when the command ends, with its code.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import os
import sys


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()
    except OSError:
        writer.close()


async def _main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--socket", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("argv", nargs="+")
    options = parser.parse_args()
    os.environ.update(json.loads(base64.b64decode(sys.stdin.readline())))

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            inner_reader, inner_writer = await asyncio.open_connection(options.host, options.port)
        except OSError:
            writer.close()
            return
        await asyncio.gather(_pump(reader, inner_writer), _pump(inner_reader, writer))
        inner_writer.close()
        writer.close()

    async def probe(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            _, inner_writer = await asyncio.open_connection(options.host, options.port)
        except OSError:
            writer.write(b"0")
        else:
            inner_writer.close()
            writer.write(b"1")
        writer.close()

    async with (
        await asyncio.start_unix_server(probe, f"{options.socket}.up"),
        await asyncio.start_unix_server(accept, options.socket),
    ):
        command = await asyncio.create_subprocess_exec(*options.argv, stdin=asyncio.subprocess.DEVNULL)
        return await command.wait()


if __name__ == "__main__":
    sys.exit(asyncio.run(_main()))
