"""The verifier with pytest's tests in the reverse order, by a plugin that its own commands load."""

import shlex
from dataclasses import replace
from typing import Final

from penstock.client.tasks.spec import Command, SeedFile, Verifier

PLUGIN: Final = "penstock_reversed"
_FOLDER: Final = ".penstock-order"
_CODE: Final = b"def pytest_collection_modifyitems(items):\n    items.reverse()\n"
_VARIABLES: Final = (
    f'export PYTHONPATH="$PWD/{_FOLDER}${{PYTHONPATH:+:$PYTHONPATH}}";'
    f' export PYTEST_ADDOPTS="${{PYTEST_ADDOPTS:+$PYTEST_ADDOPTS }}-p {PLUGIN}"; '
)


def uses_pytest(verifier: Verifier) -> bool:
    """Whether a command, or a script that comes with the verifier, names pytest."""
    if any("pytest" in str(command) for command in verifier.commands):
        return True
    return any(b"pytest" in file.content for file in verifier.files if file.path.endswith((".sh", ".bash")))


def reversed_order(verifier: Verifier) -> Verifier:
    """Returns the verifier whose pytest runs its tests from the last to the first."""
    # `python3 -m pytest` finds it in the working directory too, whatever a command makes of the variable.
    plugins = [SeedFile(f"{folder}{PLUGIN}.py", _CODE) for folder in ("", f"{_FOLDER}/")]
    return replace(verifier, files=[*verifier.files, *plugins], commands=list(map(_with_plugin, verifier.commands)))


def was_not_loaded(output: str) -> bool:
    """Whether pytest did not find the plugin: an isolated interpreter looks at no variables."""
    return f'importing plugin "{PLUGIN}"' in output or f"No module named '{PLUGIN}'" in output


def _with_plugin(command: Command) -> Command:
    # A command with a directory of its own would look for the plugin there.
    here = f"cd {shlex.quote(command.cwd)} && " if command.cwd else ""
    text = f"exec {shlex.join(command.argv)}" if command.shell is None else command.shell
    return replace(command, argv=(), shell=f"{_VARIABLES}{here}{text}", cwd="")
