"""The shell of a terminal episode: how a command runs with what the commands before it left behind.

No shell lives on. Each command is a process of its own, with an exit, a timeout and outputs of its own, and begins by
reading the state that the last one saved: a file in the sandbox, the policy's own like all else there. So nothing that
a command does to its shell can pass for another command's output or outlive its timeout, and a command that runs is
found again by its process id when the driver dies.

What goes from command to command, under bash: the working directory, all variables, functions and aliases, the umask
and `$?`; under another shell the working directory, the environment, the umask and `$?`. Shell options (`set -e`),
traps and the table of jobs are each command's own. `exit` ends a command and its state is kept; a shell that is killed,
by a timeout too, or that is replaced by `exec`, leaves the state as it was before. Standard input is empty.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from penstock_driver.ports import Command, CommandResult, Exit, ExitReason, Output

DEFAULT_OUTPUT: Final = 64 << 10
MAX_OUTPUT: Final = 1 << 20
"""Bytes of each stream that an observation has at most."""

TIMED_OUT_CODE: Final = 124
"""What `$?` is after a command that was ended by its timeout, as timeout(1) has it."""

_SHELL: Final = 'command -v bash >/dev/null 2>&1 && exec bash --noprofile --norc -c "$@"; exec sh -c "$@"'
"""Chooses the shell: bash where the sandbox has it. Its arguments are those of `-c`."""

# Arguments: 1 the state before, 2 the state after, 3 the last exit code, 4 "own" for a command with a directory of its
# own, 5 and 6 what saves and sets the variables that the command brings, 7 "script" (which comes on standard input) or
# "argv", 8 and on an argument vector. They are positional since every variable here is one of the policy's, too. The
# functions are defined after the state is restored, which brings back those of the command before. The state is saved
# at once, for commands that never come to the end of it, and again at the end.
_PROGRAM: Final = r"""
if [ "$7" = script ]; then set -- "$1" "$2" "$3" "$4" "$5" "$6" "$7" "$(cat)"; exec </dev/null; fi
eval "$5"
__ps_at=$PWD
if [ -s "$1" ]; then
  if [ -n "${BASH_VERSION-}" ]; then for __ps_cwd in $(compgen -e); do unset "$__ps_cwd"; done; fi
  . "$1" 2>/dev/null
  if [ "${__ps_whole-}" != "$1" ]; then
    __ps_cwd=$__ps_at
    echo "terminal: what earlier commands left in the shell is damaged" >&2
  fi
  [ "$4" = own ] && OLDPWD=$__ps_cwd __ps_cwd=$__ps_at
  __ps_was=${OLDPWD-}
  cd -- "$__ps_cwd" 2>/dev/null || { cd -- "$__ps_at"; echo "terminal: there is no $__ps_cwd any more" >&2; }
  OLDPWD=$__ps_was
elif [ "${1##*/}" != 0 ]; then
  echo "terminal: what earlier commands left in the shell is gone" >&2
fi
eval "$6"
unset __ps_at __ps_was __ps_cwd __ps_whole
__ps_code() { return "$1"; }
__ps_save() {
  { set +efnuvxC; } 2>/dev/null
  if [ -n "${BASH_VERSION-}" ]; then
    trap - DEBUG ERR RETURN
    {
      declare -p
      declare -f
      declare -xf
      alias -p
      umask -p
      printf '__ps_cwd=%q\n__ps_whole=%q\n' "$PWD" "$1"
    } 2>/dev/null >"$1"
  else
    {
      __ps_cwd=$PWD
      export __ps_cwd
      export -p
      echo "umask $(umask)"
      echo "__ps_whole=$1"
    } 2>/dev/null >"$1"
    unset __ps_cwd
  fi
}
eval "__ps_end() { [ -n \"\${__ps_saved-}\" ] || __ps_save '$2'; __ps_saved=1; }"
__ps_save "$2"
if [ "$7" != script ]; then shift 7; exec "$@"; fi
trap __ps_end EXIT
if [ -n "${BASH_VERSION-}" ]; then shopt -s expand_aliases; fi
__ps_code "$3"
eval "$8"
set -- "$?"
__ps_end
exit "$1"
"""


@dataclass(frozen=True, slots=True)
class ShellState:
    """Where the state of an episode's shell is: in `directory`, as command number `saved_by` left it (0 = nothing yet).

    `last_code` is what `$?` is.
    """

    directory: str
    saved_by: int = 0
    last_code: int = 0

    @property
    def path(self) -> str:
        """The file with the state."""
        return f"{self.directory}/{self.saved_by}"

    def after(self, number: int, end: Exit) -> ShellState:
        """The state after command `number`: what it saved if it ended by itself, else what there was."""
        if end.reason is ExitReason.EXITED and end.code is not None:
            return replace(self, saved_by=number, last_code=end.code)
        return replace(
            self, last_code=TIMED_OUT_CODE if end.reason is ExitReason.TIMED_OUT else 128 + (end.signal or 9)
        )


def fresh_state() -> ShellState:
    """A state that nothing was left in, in a directory that is to be made."""
    return ShellState(f"/tmp/penstock-shell-{secrets.token_hex(8)}")  # noqa: S108 - a path in the sandbox


def in_shell(command: Command, state: ShellState, number: int, env: Mapping[str, str]) -> tuple[Command, bytes | None]:
    """What runs a policy's command as number `number`, and its standard input.

    `env` is what the shell begins with; the command's own is set on top of what was left behind, and so is its `cwd`.
    """
    names = sorted(command.env)
    arguments = (
        state.path,
        f"{state.directory}/{number}",
        str(state.last_code),
        "own" if command.cwd else "",
        _each(names, "__ps_given_{0}=${{{0}-}}"),
        _each(names, "export {0}; {0}=$__ps_given_{0}; unset __ps_given_{0}"),
    )
    start = ("/bin/sh", "-c", _SHELL, "sh", _PROGRAM, "bash", *arguments)
    runs = replace(
        command,
        argv=(*start, "argv", *command.argv) if command.argv else (*start, "script"),
        shell="",
        env={**env, **command.env},
    )
    return runs, None if command.argv else command.shell.encode()


def _each(names: Iterable[str], template: str) -> str:
    """Shell text over names, which are identifiers."""
    return "; ".join(template.format(name) for name in names)


@dataclass(slots=True)
class Capture:
    """Takes a watched process's output and keeps the ends of each stream: `limit` bytes, as the sandbox sends them."""

    limit: int
    _stdout: bytearray = field(default_factory=bytearray)
    _stderr: bytearray = field(default_factory=bytearray)

    @property
    def head(self) -> int:
        """Bytes of a stream's beginning that are wanted."""
        return self.limit - self.tail

    @property
    def tail(self) -> int:
        """Bytes of its end that are wanted, when it is longer."""
        return self.limit // 2

    def take(self, output: Output) -> None:
        """A piece of output, in order; what a broken service sends beyond the limit is dropped."""
        kept = self._stderr if output.is_stderr else self._stdout
        kept += output.data[: self.limit - len(kept)]

    def result(self, end: Exit) -> CommandResult:
        """The command's outcome."""
        return CommandResult(end, bytes(self._stdout), bytes(self._stderr))
