"""`penstock-driver`, also `python -m penstock_driver`."""

from penstock_chassis import start


def main() -> None:
    """Serve until SIGTERM."""
    with start.imports():
        from penstock_chassis.server import run
        from penstock_driver.app import build
        from penstock_driver.settings import DriverSettings
    run(DriverSettings, "driver", build)


if __name__ == "__main__":
    main()
