"""Options shared by several commands: one name, one help, one meaning."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import orjson
import typer

from penstock.cli.connections.completion import agent_names
from penstock.cli.terminal.console import read, usage_error
from penstock.client import AgentChoice, Assays, Budgets, Limits, RolloutOptions, SandboxChoice, Upstream

AsJson = Annotated[
    bool,
    typer.Option(
        "--json", help="Print lines of JSON on standard output, for programs; all else goes to standard error."
    ),
]
AgentName = Annotated[
    str, typer.Option(help="Which agent; `penstock agents` lists them.", autocompletion=agent_names)
]  # fmt: skip
UpstreamChoice = Annotated[
    str | None, typer.Option(metavar="URL|NAME", help="An OpenAI-compatible endpoint, or the operator's by name.")
]
UpstreamModel = Annotated[str, typer.Option(help="The upstream's model.")]
ApiKeyEnv = Annotated[
    str | None, typer.Option(metavar="VARIABLE", help="Environment variable with the key for --upstream.")
]
AgentOptions = Annotated[
    list[str] | None, typer.Option("--option", "-o", metavar="NAME=VALUE", help="An option of the agent; repeat.")
]
SkipPermissions = Annotated[bool, typer.Option(help="Skip the agent's own permission prompts (recorded).")]
AgentTimeout = Annotated[float | None, typer.Option(min=0.001, help="Seconds that the agent may run.")]
MaxCalls = Annotated[int | None, typer.Option(min=1, help="Limit of model calls per rollout.")]
Seed = Annotated[int | None, typer.Option(help="For agents with the option `seed`; rollout i of a task gets seed + i.")]
Backend = Annotated[str, typer.Option(help="Sandbox backend; default: the tasks', or the operator's.")]
Tokenizer = Annotated[
    Path | None,
    typer.Option(exists=True, help="tokenizer.json of a file's tokens, or its directory, to show sampled text."),
]
FilesFrom = Annotated[
    list[Path] | None,
    typer.Option(
        "--files-from", metavar="DIR", exists=True, file_okay=False,
        help="Another directory whose files a task file may name, besides its own; repeat.",
    ),
]  # fmt: skip
RequireAssay = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Signed lines of `penstock tasks assay`: a task that did not pass is refused before it starts.",
    ),
]
AssayKey = Annotated[
    Path | None,
    typer.Option(envvar="PENSTOCK_ASSAY_KEY", help="File of the key of --require-assay; default: beside it, *.key."),
]
ModelsFile = Annotated[
    Path | None,
    typer.Option(
        "--models", metavar="FILE",
        help="Several models that answer the calls: YAML, as `models` of a task file; default: the task's.",
    ),
]  # fmt: skip
KeepEndState = Annotated[
    bool | None,
    typer.Option(
        "--keep-end-state/--no-keep-end-state",
        help="Keep what the agent leaves, for `penstock regrade`; default: the task's, else if graded in a fresh fork.",
    ),
]
PriceFile = Annotated[
    Path | None,
    typer.Option("--prices", metavar="FILE", help="YAML table of prices per million tokens; shows what calls cost."),
]
UserFile = Annotated[
    Path | None,
    typer.Option(
        "--user", metavar="FILE", help="YAML: who sends the agent further instructions; default: the task's user."
    ),
]
StateDir = Annotated[Path | None, typer.Option(help="State directory of the services; default: per user.")]
AllNamespaces = Annotated[
    bool, typer.Option("--all-namespaces", "-A", help="For an operator: those of all namespaces.")
]
Labels = Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE", help="Only with this label; repeat.")]


def agent_choice(agent: str, options: Sequence[str] | None, skip_permissions: bool) -> AgentChoice:
    """Returns the agent with its options. An invalid option ends the program."""
    return AgentChoice(name=agent, options=_values(options or ()), skip_permissions=skip_permissions)


def _values(items: Sequence[str]) -> dict[str, Any]:
    """Parses NAME=VALUE; a value that is JSON (a number, true, a list) is parsed, anything else is text."""
    options: dict[str, Any] = {}
    for item in items:
        name, value = pair(item, "--option")
        try:
            options[name] = orjson.loads(value)
        except orjson.JSONDecodeError:
            options[name] = value
    return options


def rollout_options(
    answers: Upstream | None = None,
    *,
    backend: str = "",
    timeout: float | None = None,
    max_calls: int | None = None,
    seed: int | None = None,
    keep_end_state: bool | None = None,
) -> RolloutOptions:
    """Returns the rollout options that were given above."""
    options: RolloutOptions = {}
    if answers is not None:
        options["source"] = answers
    if backend:
        options["sandbox"] = SandboxChoice(backend=backend)
    if timeout is not None:
        options["limits"] = Limits(agent=timeout)
    if max_calls is not None:
        options["budgets"] = Budgets(max_calls=max_calls)
    if seed is not None:
        options["seed"] = seed
    if keep_end_state is not None:
        options["keep_end_state"] = keep_end_state
    return options


def required_assays(options: RolloutOptions, file: Path | None, key: Path | None) -> None:
    """Has tasks refused that did not pass, if there is a file of assays. An unreadable one ends the program."""
    if file is not None:
        options["require_assay"] = read(lambda place: Assays.load(place, key), file)


def label_filter(items: Sequence[str] | None) -> dict[str, str]:
    return dict(pair(item, "--label") for item in items or ())


def pair(item: str, option: str) -> tuple[str, str]:
    """Parses NAME=VALUE of an option; anything else ends the program. A value may be empty."""
    name, equals, value = item.partition("=")
    if not (name and equals):
        usage_error(f"{option}: {item!r} is not NAME=VALUE")
    return name, value


def directory_of(file: Path) -> None:
    """Ends the program if the directory of a file to write does not exist."""
    if not file.parent.is_dir():
        usage_error(f"there is no directory {file.parent}")
