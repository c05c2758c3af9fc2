"""The check of one trainer, inside the environment that has it: started by `python -m tests.trainers`."""

from __future__ import annotations

import asyncio
import importlib
import sys
import tempfile
from pathlib import Path

from tests.trainers.driven import driven


async def main(name: str) -> int:
    """Run it; print what was seen and what is wrong; return 1 if anything is."""
    check = importlib.import_module(f"tests.trainers.on_{name}")
    with tempfile.TemporaryDirectory(prefix="penstock-trainers-") as temporary:
        folder = Path(temporary)
        async with driven(folder) as given:
            lines, wrong = await check.run(given, folder)
    print("\n".join([*(f"   {line}" for line in lines), *(f"   WRONG: {fault}" for fault in wrong)]))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main(sys.argv[1])))
