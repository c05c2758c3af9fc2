"""`penstock`: the command line, thin over the client."""

import os
import sys
from collections.abc import Callable, Sequence
from enum import StrEnum
from importlib import metadata
from typing import Annotated, Any, Final, cast

import typer
from rich.markup import escape
from typer.core import TyperGroup

from penstock.cli.commands import (
    agents,
    branch,
    conformance,
    control,
    credentials,
    dashboard,
    diff,
    drain,
    export,
    logprob_diff,
    metrics,
    openenv,
    replay,
    rollout,
    tasks,
    terminal,
    up,
    verify,
    watch,
)
from penstock.cli.commands.assay import scan
from penstock.cli.commands.assistant import command as assistant
from penstock.cli.commands.doctor import command as doctor
from penstock.cli.commands.evals import command as evals
from penstock.cli.commands.grades import annotate, bias, regrade, rewards
from penstock.cli.examples import add_examples, epilog
from penstock.cli.terminal.console import EXIT_CODES, INTERRUPTED, err, out
from penstock.cli.terminal.wrong_usage import explain

_UsageError = cast(
    "type[typer.BadParameter]",
    next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException"),
)
"""The exception of a wrong command line; its module's name differs between versions of typer."""


class _Group(TyperGroup):
    """A group whose errors all begin with `error:`, whether from the command line or from a service."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        given = (args, prog_name, complete_var)
        if not standalone_mode:
            return super().main(*given, False, windows_expand_args, **extra)
        try:
            code = super().main(*given, False, windows_expand_args, **extra)
        except _UsageError as error:
            if type(error).__name__ == "NoArgsIsHelpError":
                error.show()
                sys.exit(error.exit_code)
            if context := getattr(error, "ctx", None):
                err.print(escape(context.get_usage()), soft_wrap=True)
                err.print(f"Try '{context.command_path} --help' for help.\n", soft_wrap=True)
            err.print(f"[bold red]error[/]: {escape(explain(error))}", soft_wrap=True)
            sys.exit(error.exit_code)
        except typer.Abort:
            err.print("interrupted")
            sys.exit(INTERRUPTED)
        sys.exit(code if isinstance(code, int) else 0)


app = typer.Typer(
    name="penstock",
    cls=_Group,
    help="Run coding agents in sandboxes and record their model calls.",
    epilog=f"{epilog(())}\n\n{EXIT_CODES}",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
    rich_markup_mode=None,  # its tables truncate option names on narrow terminals
)
_PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def _add(command: Callable[..., None], context: dict[str, Any] | None = None) -> None:
    """Adds a command with its first line as the short help: click cuts docstrings to the width of the terminal."""
    app.command(short_help=(command.__doc__ or "").partition("\n")[0], context_settings=context)(command)


class Shell(StrEnum):
    """Shells that complete."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


def completion(
    context: typer.Context, shell: Annotated[Shell, typer.Argument(help="Which shell.", show_default=False)]
) -> None:
    """Print the script by which a shell completes this program's command lines.

    bash: eval "$(penstock completion bash)"; zsh: the same, after compinit; fish: penstock completion fish | source.
    To keep it, add that line to the shell's start file.
    """
    os.environ["_PENSTOCK_COMPLETE"] = f"source_{shell}"  # click's variable for printing the script
    context.find_root().command.main(args=[], prog_name="penstock")


_add(up.up)
_add(up.serve, _PASSED_ON)
_add(up.demo, _PASSED_ON)
_add(dashboard.dashboard)
_add(rollout.rollout)
_add(branch.branch)
_add(watch.watch)
_add(metrics.metrics)
_add(control.pause)
_add(control.resume)
_add(control.cancel)
_add(drain.drain)
_add(replay.replay)
_add(diff.diff)
_add(regrade.regrade)
app.add_typer(rewards.app, name="rewards")
_add(annotate.annotate)
_add(bias.bias)
_add(terminal.terminal)
app.add_typer(agents.app, name="agents")
app.add_typer(tasks.app, name="tasks")
app.add_typer(evals.app, name="eval")
app.add_typer(openenv.app, name="openenv")
_add(doctor.doctor)
_add(credentials.credentials)
_add(export.export)
_add(verify.verify)
app.command(name="scan", short_help="Search the tool calls of trajectories for cheating.")(scan.scan_)
_add(logprob_diff.gap)
_add(conformance.conformance)
_add(assistant.mcp)
_add(completion)
add_examples(app)


DISTRIBUTIONS: Final = "penstock"
"""How the names of the distributions begin that `--version` lists."""


def _print_versions(asked: bool) -> None:
    if not asked:
        return
    names = sorted(
        {item.name for item in metadata.distributions() if item.name and item.name.lower().startswith(DISTRIBUTIONS)}
    )
    for name in names:
        out.print(f"{name} {metadata.version(name)}")
    raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_versions, is_eager=True, help="Versions of the installed packages."),
    ] = False,
    namespace: Annotated[
        str | None,
        typer.Option(
            envvar="PENSTOCK_NAMESPACE",
            help="For an operator: the namespace to act in. A trainer's token belongs to one already.",
        ),
    ] = None,
    discover: Annotated[
        bool,
        typer.Option(
            "--discover/--no-discover",
            envvar="PENSTOCK_DISCOVER",
            help="Whether the driver is asked for other services of each kind. Not through forwarded ports.",
        ),
    ] = True,
) -> None:
    """What holds for all commands."""
    if not discover:
        os.environ["PENSTOCK_DISCOVER"] = "false"  # where every connection of the command looks
    if namespace is not None:
        os.environ["PENSTOCK_NAMESPACE"] = namespace  # where every connection of the command looks


if __name__ == "__main__":
    app()
