"""`penstock-interception`, also `python -m penstock_interception`."""

import os

from penstock_chassis.server import run
from penstock_interception.app import build
from penstock_interception.settings import InterceptionSettings


def main() -> None:
    """Serve until SIGTERM."""
    # The tokenizer's own threads take two to five times the CPU for the few words that are new in a prompt, and longer.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    run(InterceptionSettings, "interception", build)


if __name__ == "__main__":
    main()
