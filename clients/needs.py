"""What the Python client needs to serve the dashboard, a requirement a line, as its pyproject.toml has it.

    python -m clients.needs

For who brings wheels to where no package index is (`make wheels`): building the client's own wheel would build the
dashboard's page, too.
"""

import tomllib
from pathlib import Path
from typing import Final

DISTRIBUTIONS: Final = "penstock"
"""How the names of this repository's distributions begin."""

_FILE = Path(__file__).resolve().parent / "python" / "sdk" / "pyproject.toml"


def needs() -> list[str]:
    """The requirements, but for those that are distributions of this repository."""
    project = tomllib.loads(_FILE.read_text(encoding="utf-8"))["project"]
    named: list[str] = [*project["dependencies"], *project["optional-dependencies"]["dashboard"]]
    return [requirement for requirement in named if not requirement.startswith(DISTRIBUTIONS)]


if __name__ == "__main__":
    print(*needs(), sep="\n")
