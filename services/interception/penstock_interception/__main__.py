"""`penstock-interception`, also `python -m penstock_interception`."""

import os

from penstock_chassis import start


def main() -> None:
    """Serves until SIGTERM."""
    # For the few new words of a prompt, the tokenizer's own threads need two to five times the CPU, and take longer.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    with start.imports():
        from penstock_chassis.server import run
        from penstock_interception.app import build
        from penstock_interception.settings import InterceptionSettings
    run(InterceptionSettings, "interception", build)


if __name__ == "__main__":
    main()
