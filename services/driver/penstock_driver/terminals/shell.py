"""The shell of a terminal episode: carries state from one command to the next.

No shell process stays alive. Each command is a process of its own, with its own exit, timeout and outputs. It starts by
reading the state that the last one saved in a file in the sandbox, which the policy owns like everything else there. So
no manipulation of the shell can pass for another command's output or outlive its command's timeout, and after a crash
of the driver a running command is found by its process id.

State kept between commands, under bash: the working directory, all variables, functions and aliases, the umask and
`$?`; under another shell the working directory, the environment, the umask and `$?`. Shell options (`set -e`), traps
and the job table are each command's own. `exit` ends a command and keeps its state. A shell that is killed, also by a
timeout, or is replaced by `exec`, leaves the previous state unchanged. Standard input is empty.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from penstock_driver.domain.ports import Command, CommandResult, Exit, ExitReason, Output

TIMED_OUT_CODE: Final = 124
"""The value of `$?` after a command that timed out, as in timeout(1)."""

_SHELL: Final = 'command -v bash >/dev/null 2>&1 && exec bash --noprofile --norc -c "$@"; exec sh -c "$@"'
"""Chooses the shell: bash if the sandbox has it. Its arguments are those of `-c`."""

# Arguments: 1 the previous state, 2 the next state, 3 the last exit code, 4 "own" for a command with its own directory,
# 5 and 6 shell text that saves and sets the command's own variables, 7 "script" (on standard input) or "argv", 8 and up
# an argument vector. They are positional because every variable here also exists for the policy. The functions are
# defined after the state is restored, which brings back the functions of the previous command. The state is saved at
# once, for commands that never reach their end, and again at the end.
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
    """The state of an episode's shell: in `directory`, as command number `saved_by` left it (0 = none yet).

    `last_code` is the value of `$?`.
    """

    directory: str
    saved_by: int = 0
    last_code: int = 0

    @property
    def path(self) -> str:
        """The state file."""
        return f"{self.directory}/{self.saved_by}"

    def after(self, number: int, end: Exit) -> ShellState:
        """The state after command `number`: the one it saved if it exited by itself, otherwise the previous one."""
        if end.reason is ExitReason.EXITED and end.code is not None:
            return replace(self, saved_by=number, last_code=end.code)
        return replace(
            self, last_code=TIMED_OUT_CODE if end.reason is ExitReason.TIMED_OUT else 128 + (end.signal or 9)
        )


def fresh_state() -> ShellState:
    """An empty state, in a directory that is still to be created."""
    return ShellState(f"/tmp/penstock-shell-{secrets.token_hex(8)}")  # noqa: S108 - a path in the sandbox


def in_shell(command: Command, state: ShellState, number: int, env: Mapping[str, str]) -> tuple[Command, bytes | None]:
    """The process that runs a policy's command as number `number`, and its standard input.

    `env` is the shell's initial environment; the command's own variables and `cwd` override the state.
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
    """The template rendered for each name; names are identifiers."""
    return "; ".join(template.format(name) for name in names)


@dataclass(slots=True)
class Capture:
    """Collects a watched process's output: both ends of each stream, at most `limit` bytes per stream."""

    limit: int
    _stdout: bytearray = field(default_factory=bytearray)
    _stderr: bytearray = field(default_factory=bytearray)

    @property
    def head(self) -> int:
        """Bytes to request from the beginning of a stream."""
        return self.limit - self.tail

    @property
    def tail(self) -> int:
        """Bytes to request from its end, when it is longer."""
        return self.limit // 2

    def take(self, output: Output) -> None:
        """Add a piece of output, in order; bytes beyond the limit, sent by a broken service, are dropped."""
        kept = self._stderr if output.is_stderr else self._stdout
        kept += output.data[: self.limit - len(kept)]

    def result(self, end: Exit) -> CommandResult:
        return CommandResult(end, bytes(self._stdout), bytes(self._stderr))
