"""`penstock-driver`, also `python -m penstock_driver`."""

from penstock_chassis.server import run
from penstock_driver.app import build
from penstock_driver.settings import DriverSettings


def main() -> None:
    """Serve until SIGTERM."""
    run(DriverSettings, "driver", build)


if __name__ == "__main__":
    main()
