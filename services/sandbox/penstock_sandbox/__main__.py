"""``penstock-sandbox``: the sandbox service."""

from __future__ import annotations

from penstock_chassis import start


def main() -> None:
    """Runs the service until it receives a stop signal."""
    with start.imports():
        from penstock_chassis.server import run
        from penstock_sandbox.app import build
        from penstock_sandbox.settings import SandboxSettings
    run(SandboxSettings, "sandbox", build)


if __name__ == "__main__":
    main()
