"""`penstock conformance`: checks whether a model's own template is fit for token-exact rollouts."""

import importlib.util
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.connections.options import AsJson
from penstock.cli.terminal.console import usage_error


def conformance(
    model: Annotated[
        Path,
        typer.Option(metavar="DIR", help="tokenizer.json, tokenizer_config.json and the chat template of your model."),
    ],
    parser: Annotated[
        str | None, typer.Option(metavar="NAME", help="Parser of tool calls; unset = the template decides.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run the token fidelity suite on your model's tokenizer and chat template, offline."""
    if importlib.util.find_spec("penstock_interception") is None:
        usage_error("the interception service is not installed: pip install 'penstock[local]'")
    if not model.is_dir():
        usage_error(f"--model: there is no directory {model}")
    options = [*(["--parser", parser] if parser is not None else []), *(["--json"] if as_json else [])]
    program = [sys.executable, "-m", "penstock_interception.conformance", "--model", str(model.absolute()), *options]
    os.execv(sys.executable, program)  # noqa: S606 - no shell
