"""`penstock-inference`, also `python -m penstock_inference`."""

from penstock_chassis.server import run
from penstock_inference.app import build
from penstock_inference.settings import InferenceSettings


def main() -> None:
    """Serve until SIGTERM."""
    run(InferenceSettings, "inference", build)


if __name__ == "__main__":
    main()
