"""Images on the local backend: pull and unpack, first command, and creates of a large image beside the host's programs.

    python -m benchmarks.scale.images [--megabytes 2048] [--files 40000] [--creates 64]

Needs Debian's docker-registry. One run, one machine: compare its lines with each other.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import tempfile
import time
from pathlib import Path

from tests.support.docker import base_images
from tests.support.images.registry import entry, layer, registry

from penstock_sandbox.backends.images.registry import RegistryOptions
from penstock_sandbox.backends.images.store import ImageOptions
from penstock_sandbox.backends.local.backend import HOST, LocalBackend, LocalOptions
from penstock_sandbox.domain.backend import SandboxHandle
from penstock_sandbox.domain.model import SandboxSpec
from penstock_sandbox.processes.output import Collected

_LAYERS = 8
_UNPACKER = 61_999


async def _first_command(sandbox: SandboxHandle) -> None:
    sink = Collected()
    process = await sandbox.start(["/bin/true"], sandbox.default_env, "/", sink, stdin=False, pty=None)
    ended = await sink.ended
    assert ended is not None and ended.code == 0, sink.text
    await process.aclose()


async def _creates(backend: LocalBackend, image: str, count: int) -> tuple[float, float]:
    """Seconds until ``count`` concurrent creates are all there, and the median of one create that is alone."""
    began = time.monotonic()
    boxes = await asyncio.gather(
        *(backend.create(f"s{number}", SandboxSpec(image=image), (), lambda _: None) for number in range(count))
    )
    together = time.monotonic() - began
    for box in boxes:
        await box.destroy()
    alone = []
    for number in range(10):
        began = time.monotonic()
        box = await backend.create(f"a{number}", SandboxSpec(image=image), (), lambda _: None)
        alone.append(time.monotonic() - began)
        await box.destroy()
    return together, statistics.median(alone)


async def main(megabytes: int, files: int, creates: int) -> None:
    """Measure and print."""
    size = megabytes * 1024 * 1024 // files
    # Half of it can be compressed, as of programs.
    block = random.Random(1).randbytes(size // 2)
    async with registry() as running:
        for name, per_layer in (("small", 0), ("large", files // _LAYERS)):
            layers = [base_images.base().read_bytes()]
            if per_layer:
                for number in range(_LAYERS):
                    entries = [
                        entry(
                            f"opt/data/{number}/{one // 200}/{one}",
                            one.to_bytes(8, "big") + block + bytes(size - size // 2 - 8),
                        )
                        for one in range(per_layer)
                    ]
                    layers.append(layer(entries))
            await running.push(name, layers)
        with tempfile.TemporaryDirectory(prefix="penstock-images-") as folder:
            Path(folder).chmod(0o755)
            user = _UNPACKER if os.geteuid() == 0 else None
            images = ImageOptions(RegistryOptions(plain_http=frozenset([running.host])), unpack_as=user)
            backend = LocalBackend(LocalOptions(Path(folder) / "local", images=images))
            await backend.open()
            try:
                for name in ("small", "large"):
                    began = time.monotonic()
                    box = await backend.create(name, SandboxSpec(image=running.image(name)), (), lambda _: None)
                    made = time.monotonic() - began
                    await _first_command(box)
                    print(
                        f"{name}: unseen image to first command: {time.monotonic() - began:.2f} s (create {made:.2f} s)"
                    )
                    await box.destroy()
                for name in (HOST, running.image("small"), running.image("large")):
                    together, alone = await _creates(backend, name, creates)
                    print(f"{name}: {creates} creates {together * 1000:.0f} ms; one alone {alone * 1000:.1f} ms")
            finally:
                await backend.aclose()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=2048)
    parser.add_argument("--files", type=int, default=40_000)
    parser.add_argument("--creates", type=int, default=64)
    asyncio.run(main(**vars(parser.parse_args())))
