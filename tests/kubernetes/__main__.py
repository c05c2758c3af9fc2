"""The chart on a real API server: `build` makes it, once; `check` applies the chart to it; `up` leaves it running.

The server is Kubernetes 1.20.2 with the controllers that have to do with the chart, and no machine: pods are bound and
made ready by the checks. `check` exits with 1 at the first thing that is not as it must be.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from pathlib import Path

from tests.kubernetes import checks
from tests.kubernetes.build import build
from tests.kubernetes.server import cluster


def main() -> int:
    """Run the command; return 0 if nothing was wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.kubernetes", description=__doc__)
    parser.add_argument("command", choices=["build", "check", "up"])
    parser.add_argument("--folder", type=Path, help="keep logs here; default: a temporary directory")
    given = parser.parse_args()
    if given.command == "build":
        build()
        return 0
    with tempfile.TemporaryDirectory(prefix="penstock-kubernetes-") as temporary:
        folder = (given.folder or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        with cluster(folder) as started:
            if given.command == "up":
                print(f"export KUBECONFIG={folder / 'admin.json'}", flush=True)
                signal.sigwait({signal.SIGINT, signal.SIGTERM})
                return 0
            try:
                checks.run(started)
            except AssertionError as error:
                print(error, file=sys.stderr)
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
