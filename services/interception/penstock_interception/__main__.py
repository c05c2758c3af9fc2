"""`penstock-interception`, also `python -m penstock_interception`."""

from penstock_chassis.server import run
from penstock_interception.app import build
from penstock_interception.settings import InterceptionSettings


def main() -> None:
    """Serve until SIGTERM."""
    run(InterceptionSettings, "interception", build)


if __name__ == "__main__":
    main()
