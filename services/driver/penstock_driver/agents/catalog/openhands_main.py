"""Starts OpenHands CLI without a terminal: `openhands_main.py INSTRUCTION_FILE`, or `openhands_main.py --check`.

The program is OpenHands' own, but for two functions that would ask the network: for a newer version, and for its
vendor's skills. The instruction comes from a file, but not by its option for files, which puts lines around the text.
"""

import sys
from pathlib import Path

import openhands.sdk.skills.skill as skills  # type: ignore[import-not-found]
import openhands_cli.tui.content.splash as splash  # type: ignore[import-not-found]
from openhands_cli import __version__
from openhands_cli.entrypoint import main  # type: ignore[import-not-found]
from openhands_cli.stores import AgentStore  # type: ignore[import-not-found]
from openhands_cli.tui import textual_app  # noqa: F401
from openhands_cli.version_check import VersionInfo  # type: ignore[import-not-found]


def run(instruction: Path) -> None:
    # Neither has a setting. A rollout with a network would get other prompts than one without.
    skills.load_public_skills = lambda **_: []
    splash.check_for_updates = lambda: VersionInfo(__version__, None, False, None)
    if AgentStore().load_from_disk() is None:
        # It would say so and exit with 0.
        sys.exit("OpenHands does not accept its configuration, .openhands/agent_settings.json")
    sys.argv[1:] = ["--headless", "--json", "--task", instruction.read_bytes().decode("utf-8")]
    main()


if __name__ == "__main__":
    if sys.argv[1] == "--check":
        print("OpenHands CLI", __version__)
    else:
        run(Path(sys.argv[1]))
