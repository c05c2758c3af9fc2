"""The task that `penstock tasks new` writes: a repository with pytest, which proves itself unchanged."""

from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Final

_TASK: Final = """\
# A task: what the agent gets, how its work is graded, and a solution. docs/guides/tasks.md has all keys.
instruction_file: instruction.md
files:
  - {path: ., from: repository}         # the working directory, as the agent finds it
sandbox:
  packages:
    # Installed once, outside of sandboxes, and mounted read-only: python3 and PATH have them. Make it again with
    #   echo pytest | uv pip compile - --universal --generate-hashes --no-annotate --no-header -o requirements.txt
    python: requirements.txt
verifier:
  files:
    - {path: checks, from: checks}      # not there while the agent works
  changes_below: [src]                  # nothing else that the agent changed is in the sandbox that is graded
  commands:
    - [pytest, -q, checks]
solution:                               # no agent gets it; `penstock tasks prove` runs it
  files:
    - {path: src/slug.py, from: solution/slug.py}
  commands:
    - [pytest, -q, -o, pythonpath=src]
limits: {agent: 600, verify: 120}
"""

_INSTRUCTION: Final = """\
slug() in src/slug.py makes a name for an address from a title. It keeps punctuation, and writes several hyphens in a
row. Make it keep letters and digits only, in lower case, with one hyphen between words and none at the ends.

`pytest -o pythonpath=src` runs the tests.
"""

_BROKEN: Final = '''\
"""Names for addresses."""


def slug(title: str) -> str:
    """Return a title as a name for an address: "Hello World" is "hello-world"."""
    return title.lower().replace(" ", "-")
'''

_SOLUTION: Final = '''\
"""Names for addresses."""

import re


def slug(title: str) -> str:
    """Return a title as a name for an address: "Hello World" is "hello-world"."""
    return "-".join(re.findall(r"[a-z0-9]+", title.lower()))
'''

_TESTS: Final = """\
from slug import slug


def test_words_are_joined_by_a_hyphen():
    assert slug("Hello World") == "hello-world"
"""

_CHECKS: Final = """\
import json
import subprocess
import sys

import pytest

# The agent's code runs in a process of its own, and prints: in pytest's it could end the tests with a success.
PROGRAM = (
    "import json, sys; sys.path.insert(0, 'src'); from slug import slug;"
    "print(json.dumps(slug(json.load(sys.stdin))))"
)


@pytest.mark.parametrize(
    ("title", "name"),
    [
        ("Hello World", "hello-world"),
        ("Hello,  World!", "hello-world"),
        ("  2 + 2 = 4  ", "2-2-4"),
        ("already-a-slug", "already-a-slug"),
        ("!?", ""),
    ],
)
def test_a_slug_has_words_and_single_hyphens(title, name):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], input=json.dumps(title), capture_output=True, text=True, timeout=30, check=True
    )
    assert json.loads(done.stdout) == name
"""


def files() -> Mapping[str, str]:
    """Returns the files of the task, by their paths in its directory."""
    return {
        "task.yaml": _TASK,
        "instruction.md": _INSTRUCTION,
        "requirements.txt": resources.files(__package__).joinpath("pytest.txt").read_text("utf-8"),
        "repository/src/slug.py": _BROKEN,
        "repository/tests/test_slug.py": _TESTS,
        "checks/test_slugs.py": _CHECKS,
        "solution/slug.py": _SOLUTION,
    }


def write(folder: Path) -> None:
    """Writes the task into a directory, which is made.

    Raises:
        FileExistsError: the directory exists already.
        OSError: it cannot be written.
    """
    folder.mkdir(parents=True)
    for name, text in files().items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
