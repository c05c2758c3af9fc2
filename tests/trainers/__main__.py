"""`python -m tests.trainers NAME ...`: trainers' own classes load our plug-ins and run them on real services.

Each is driven up to the tensors that its trainer consumes, which must equal the trajectories and what the engine gave.
It needs the environment of `make test-vllm`, network access at first, and no GPU. Exits with 1 if anything differs.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from tests.trainers.environments import BASE, TRAINERS, installed, run


def main() -> int:
    """Run the checks that are named, one after another."""
    parser = argparse.ArgumentParser(prog="python -m tests.trainers", description=__doc__)
    parser.add_argument(
        "names", nargs="+", choices=[*TRAINERS, "all"], metavar="NAME", help=f"{', '.join(TRAINERS)}, all"
    )
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "penstock-trainers")
    parser.add_argument("--base", type=Path, default=BASE, help="the Python with torch, Transformers and vLLM")
    parser.add_argument(
        "--repository",
        action="append",
        default=[],
        metavar="NAME=FROM",
        help="where git fetches a trainer that is on no package index, instead of its own address",
    )
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for each check")
    given = parser.parse_args()
    if not given.base.exists():
        parser.error(f"--base: {given.base} is missing: `make test-vllm` makes it")
    repositories = dict(item.partition("=")[::2] for item in given.repository)
    failed = []
    for name in TRAINERS if "all" in given.names else given.names:
        packages = installed(name, given.cache.resolve(), given.base.absolute(), repositories.get(name))
        begun = time.monotonic()
        print(f"== {name}: {TRAINERS[name].version}", flush=True)
        if run(name, packages, given.base.absolute(), given.timeout):
            failed.append(name)
        print(f"   {time.monotonic() - begun:.0f} s", flush=True)
    if failed:
        print(f"Failed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
