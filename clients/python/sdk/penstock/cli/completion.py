"""`penstock completion`: the script by which a shell completes commands, options and what the services know."""

import os
from enum import StrEnum
from typing import Annotated

import typer


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
    In the shell's own start file it lasts.
    """
    os.environ["_PENSTOCK_COMPLETE"] = f"source_{shell}"  # how a program is asked for it
    context.find_root().command.main(args=[], prog_name="penstock")
