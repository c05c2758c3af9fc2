"""Programs of an agent that try to outlive the kill of their tree, for x86-64: an image needs nothing to run them.

Each hop writes one byte to the program's standard output, so a file that is given for that stands still when, and only
when, nobody of the chain is left.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Final

from tests.support.docker.backend import run

from penstock_chassis.errors import NotFound
from penstock_sandbox.domain.backend import SandboxHandle
from penstock_sandbox.processes.output import Collected

FLAGS: Final = {
    "fork": 17,
    "memory": 0x100 | 17,
    "vfork": 0x4000 | 0x100 | 17,
    "sibling": 0x8000 | 17,
    "silent": 0,
}
"""How a hop makes the next: as fork does, sharing memory, as vfork does, as a brother, without a signal at its end."""

_BASE = 0x400000


def hopper(flags: int) -> bytes:
    """An executable that makes a copy of itself with clone's ``flags`` and ends, as does the copy, for ever."""
    again = bytes.fromhex(
        "b801000000"  # mov eax, 1 (write)
        "bf01000000"  # mov edi, 1
        "be00004000"  # mov esi, the file's first byte
        "ba01000000"  # mov edx, 1
        "0f05"  # syscall
    )
    clone = (
        bytes.fromhex("b838000000bf")  # mov eax, 56 (clone); mov edi, flags
        + struct.pack("<I", flags)
        + bytes.fromhex(
            "31f6"  # xor esi, esi (the same stack)
            "31d2"  # xor edx, edx
            "4531d2"  # xor r10d, r10d
            "4531c0"  # xor r8d, r8d
            "0f05"  # syscall
            "85c0"  # test eax, eax
        )
    )
    # The copy goes on, and whoever could make none tries again.
    back = len(again) + len(clone)
    jumps = b"\x74" + struct.pack("b", -(back + 2)) + b"\x78" + struct.pack("b", -(back + 4))
    code = again + clone + jumps + bytes.fromhex("b83c00000031ff0f05")  # exit(0)
    entry = _BASE + 64 + 56
    size = 64 + 56 + len(code)
    header = b"\x7fELF\x02\x01\x01".ljust(16, b"\0")
    header += struct.pack("<HHIQQQIHHHHHH", 2, 62, 1, entry, 64, 0, 0, 64, 56, 1, 0, 0, 0)
    return header + struct.pack("<IIQQQQQQ", 1, 5, 0, _BASE, _BASE, size, size, 0x1000) + code


async def kill_each_chain(handle: SandboxHandle, counts: Iterable[int]) -> None:
    """Start so many chains of each kind, kill their tree, and see that nobody hops any more and the sandbox works."""
    for name, flags in FLAGS.items():
        async with handle.open_write(f"/tmp/{name}", 0o755) as writer:
            await writer.write(hopper(flags))
            await writer.commit()
        for count in counts:
            beat = f"/tmp/{name}-{count}"
            # Bounded for the machine's sake: not every sandbox has a limit.
            chains = f"ulimit -u 1000; for i in $(seq {count}); do setsid /tmp/{name} >> {beat} & done; exec sleep 600"
            tree = await handle.start(
                ["bash", "-c", chains], handle.default_env, "/", Collected(), stdin=False, pty=None
            )
            while await _size(handle, beat) < 100:
                pass
            await tree.kill()
            after = await _size(handle, beat)
            for _ in range(20):
                assert await run(handle, "true") == (0, "")
            assert await _size(handle, beat) == after, f"{name} by {count} lives"
            await tree.aclose()


async def _size(handle: SandboxHandle, path: str) -> int:
    try:
        return (await handle.stat(path)).size
    except NotFound:
        return 0
