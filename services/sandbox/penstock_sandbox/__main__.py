"""``penstock-sandbox``: the sandbox service."""

from __future__ import annotations

from penstock_chassis.server import run
from penstock_sandbox.service import build
from penstock_sandbox.settings import SandboxSettings


def main() -> None:
    """Run the service until it is told to stop."""
    run(SandboxSettings, "sandbox", build)


if __name__ == "__main__":
    main()
