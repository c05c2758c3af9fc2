"""`penstock-inference`, also `python -m penstock_inference`."""

from penstock_chassis import start


def main() -> None:
    """Serve until SIGTERM."""
    with start.imports():
        from penstock_chassis.server import run
        from penstock_inference.app import build
        from penstock_inference.settings import InferenceSettings
    run(InferenceSettings, "inference", build)


if __name__ == "__main__":
    main()
