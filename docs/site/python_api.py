"""The reference of the Python client, as pages for mkdocstrings: which names stand on which page.

The texts, signatures and types are those of the sources, which mkdocstrings reads without importing them. Invariants:
each name of `penstock.client` is on exactly one page; one that no page takes is an error.
"""

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from docs.site.descriptors import ROOT

SDK: Final = ROOT / "clients/python/sdk"
_CLIENT: Final = "penstock.client"


@dataclass(frozen=True, slots=True)
class Page:
    """A page: its title, what it is for, the modules of `penstock.client` whose public names it takes, other names."""

    title: str
    text: str
    modules: Sequence[str] = ()
    """Below `penstock.client`; one that ends in a dot takes all modules below it."""
    others: Sequence[str] = ()
    """Full names that `penstock.client` does not export."""


PAGES: Final[Mapping[str, Page]] = {
    "connection.md": Page(
        "Connection",
        "`connect()` returns a `Penstock`, which has one client for each thing that the services do.",
        ("connection", "transport.", "operations"),
        ("penstock.client.operations.OperationsClient", "penstock.local.stack.LocalStack"),
    ),
    "rollouts.md": Page(
        "Rollouts and groups",
        "`ps.rollouts`, `ps.groups` and `ps.agents`: start rollouts, follow them, get their results.",
        ("rollouts.assays", "rollouts.client", "rollouts.handles", "types.results"),
        (
            "penstock.client.rollouts.client.RolloutsClient",
            "penstock.client.rollouts.client.GroupsClient",
            "penstock.client.agents.AgentsClient",
            "penstock.client.agents.Agent",
        ),
    ),
    "trajectories.md": Page(
        "Trajectories",
        "What a rollout leaves: calls, branches, samples, the reward.",
        ("types.trajectories",),
    ),
    "gate.md": Page(
        "The gate",
        "`ps.intercept(...)` and `ps.gate`: calls come in, completions go out; tools of your program.",
        ("intercept.", "types.gate"),
        ("penstock.client.intercept.gate.GateClient",),
    ),
    "chat.md": Page("Messages and completions", "Prompts, sampling parameters, completions, tools.", ("types.chat",)),
    "inference.md": Page(
        "Inference",
        "`ps.inference`: generate, score, push weights and adapters, pause.",
        ("inference.",),
        ("penstock.client.inference.client.InferenceClient",),
    ),
    "tasks.md": Page("Tasks", "A task and its parts: files, sandbox, verifier, limits, budgets.", ("tasks.",)),
    "sandboxes.md": Page(
        "Sandboxes",
        "`ps.sandboxes` and `ps.toolboxes`: commands, files, snapshots and forks without an agent.",
        ("sandboxes.", "types.processes", "types.sandboxes", "types.toolboxes"),
        (
            "penstock.client.sandboxes.client.SandboxesClient",
            "penstock.client.sandboxes.toolboxes.ToolboxesClient",
        ),
    ),
    "terminals.md": Page(
        "Terminal episodes",
        "`ps.terminals`: the policy types the commands itself.",
        ("terminals", "terminus."),
        ("penstock.client.terminals.TerminalsClient",),
    ),
    "pacing.md": Page(
        "Batches while rollouts run",
        "`ps.stream(...)`: batches of ended groups for an asynchronous trainer.",
        ("pacing.",),
    ),
    "runs.md": Page(
        "Metrics of runs",
        "`ps.runs` and `session.log`: what a trainer measures, by step.",
        ("rollouts.runs",),
        ("penstock.client.rollouts.runs.RunsClient",),
    ),
    "errors.md": Page(
        "Exceptions",
        "One class for each gRPC code, and some for what a trainer handles. Compare `reason`: "
        "[all reasons](../../errors.md).",
        ("errors",),
    ),
    "adapters.md": Page(
        "For trainers, files and loggers",
        "Rollouts in trainers' forms, tables in files, metrics of a step.",
        (),
        (
            "penstock.adapters.trainers.selection.select",
            "penstock.adapters.trainers.selection.Selection",
            "penstock.adapters.loggers.step_metrics",
            "penstock.analysis.export.write",
            "penstock.analysis.export.Table",
            "penstock.analysis.logprob_diff.compare",
            "penstock.tasks.sets.load_tasks",
            "penstock.evaluation.runner.Evaluation",
        ),
    ),
}
"""By file, in the order of the site."""


def pages() -> dict[str, str]:
    """The Markdown of each page by its file, `index.md` first.

    Raises:
        ValueError: a name of `penstock.client` belongs to no page, or to several.
    """
    names: dict[str, list[str]] = {file: [] for file in PAGES}
    for name, module in exported().items():
        takers = [file for file, page in PAGES.items() if any(_takes(item, module) for item in page.modules)]
        if len(takers) != 1:
            raise ValueError(f"{name} of {module}: {len(takers)} pages of docs/site/python_api.py take it, not one")
        names[takers[0]].append(f"{module}.{name}")
    made = {"index.md": _index(names)}
    for file, page in PAGES.items():
        # A page begins with its clients and functions, then handles, then values.
        rows = sorted(names[file], key=lambda full: full.rsplit(".", 1)[1].lower())
        made[file] = "\n".join(_page(page, [*page.others, *rows]))
    return made


def exported() -> dict[str, str]:
    """The module that defines each name of `penstock.client`."""
    tree = ast.parse((SDK / "penstock/client/__init__.py").read_text(encoding="utf-8"))
    return {
        item.name: node.module
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.module
        for item in node.names
    }


def _takes(pattern: str, module: str) -> bool:
    inside = module.removeprefix(f"{_CLIENT}.")
    return inside.startswith(pattern) if pattern.endswith(".") else inside == pattern


def _page(page: Page, names: Sequence[str]) -> Iterator[str]:
    yield f"# {page.title}\n\n{page.text}\n"
    for name in names:
        yield f"::: {name}\n"


def _index(names: Mapping[str, Sequence[str]]) -> str:
    rows = [
        f"| [{page.title}]({file}) | {page.text.split(': ', 1)[-1] if page.text.startswith('`ps') else page.text} |"
        for file, page in PAGES.items()
    ]
    listed = sorted((full.rsplit(".", 1)[1], file) for file, found in names.items() for full in found)
    links = " · ".join(f"[`{name}`]({file})" for name, file in listed)
    return "\n".join(
        [
            "# Python API",
            "",
            "Made from the docstrings of the client. What `penstock.client` exports is imported from there: "
            "`from penstock.client import connect, Task`. `penstock.client.sync` has the same names without `await`. "
            "How they are used together is in [the guide](../../guides/your-own-trainer.md).",
            "",
            "| page | what is there |",
            "|---|---|",
            *rows,
            "",
            "## Names",
            "",
            links,
            "",
        ]
    )
