"""Writes how many machines of a Ray cluster are alive into a file, each second, once the cluster is up."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import ray


def main() -> None:
    """Run until it is killed."""
    file = Path(sys.argv[1])
    while not ray.is_initialized():
        try:
            ray.init(address="auto", log_to_driver=False)
        except ConnectionError:
            time.sleep(1)
    while True:
        partial = file.with_suffix(".partial")
        partial.write_text(str(sum(node["Alive"] for node in ray.nodes())))
        partial.replace(file)
        time.sleep(1)


if __name__ == "__main__":
    main()
