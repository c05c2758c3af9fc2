"""Shell scripts for sandboxes: POSIX sh and what every image has, since a task's image may have nothing else."""

import base64
import shlex
from collections.abc import Sequence
from typing import Final

from penstock.client.tasks.spec import Command, SeedFile, Solution

MAX_SCRIPT_BYTES: Final = 900_000
"""Below the limit of an instruction, which carries a script."""


def of_solution(solution: Solution) -> str:
    """Returns the script that puts a solution in place.

    Its files are written by the script and not prepared: the prepared state is then the one of agents, shared by all
    trials, and setup commands do not see them.
    """
    return "set -e\n" + "".join(map(write_file, solution.files)) + script(solution.commands)


def script(commands: Sequence[Command]) -> str:
    """Returns commands as one shell script that stops at the first failure."""
    lines = ["set -e\n"]
    for command in commands:
        words = list(command.argv) if command.shell is None else ["sh", "-c", command.shell]
        env = [f"{name}={value}" for name, value in {**command.env, **command.secret_env}.items()]
        line = shlex.join(["env", *env, *words] if env else words)
        lines.append(f"(cd {shlex.quote(command.cwd)} && {line})\n" if command.cwd else f"{line}\n")
    return "".join(lines)


def write_file(file: SeedFile) -> str:
    """Returns shell lines that write a file, with its directories."""
    path = quoted_path(file.path)
    lines = f'mkdir -p "$(dirname -- {path})"\n'
    try:
        text = file.content.decode("utf-8")
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        lines += f"base64 -d >{path} <<'END'\n{base64.encodebytes(file.content).decode()}END\n"
    else:
        lines += f"printf %s {shlex.quote(text)} >{path}\n"
    return lines + (f"chmod {file.mode:o} {path}\n" if file.mode is not None else "")


def replace_lines(path: str, first: int, count: int, lines: Sequence[str]) -> str:
    """Returns shell lines that put `lines` in the place of `count` lines of a file, from number `first` (1 or more)."""
    name, new = quoted_path(path), quoted_path(path + ".penstock-new")
    text = "".join(f"{line}\n" for line in lines)
    return (
        f"{{ head -n {first - 1} {name}; printf %s {shlex.quote(text)}; tail -n +{first + count} {name}; }} >{new}\n"
        f"cat {new} >{name}\nrm -f {new}\n"
    )


def quoted_path(path: str) -> str:
    """Quotes a path; one that begins with `-` is no option then."""
    if path.startswith("~/"):
        return f'"$HOME"/{shlex.quote(path[2:])}'
    return shlex.quote(path if path.startswith("/") else f"./{path}")
