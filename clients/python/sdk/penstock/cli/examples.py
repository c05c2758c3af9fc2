"""Examples of each command, with which its `--help` ends."""

from collections.abc import Mapping, Sequence
from typing import Final

import typer
from typer.main import get_command_name

EXAMPLES: Final[Mapping[str, Sequence[str]]] = {
    "": (
        "penstock demo",
        "penstock up --model-dir MODEL",
        "penstock rollout --agent opencode --task task.yaml",
        "penstock watch",
    ),
    "up": (
        "penstock up --model-dir MODEL",
        "penstock up --upstream mine=https://api.example.com/v1 \\",
        "    --api-key-env mine=KEY",
        "penstock up --model-dir MODEL --engine vllm -- python train.py",
    ),
    "serve": (
        "penstock serve sandbox --help",
        "penstock serve inference --model-dir MODEL --engine vllm",
    ),
    "demo": (
        "penstock demo",
        "penstock demo --seed 7 --steps 20",
        "penstock demo --agent mini-swe-agent",
    ),
    "dashboard": (
        "penstock dashboard",
        "penstock dashboard --connection credentials/connection.json --port 0",
    ),
    "rollout": (
        "penstock rollout --agent opencode --task task.yaml -n 8",
        "penstock rollout --agent shell --task task.yaml --model-dir MODEL",
        "penstock rollout --agent codex --task task.yaml --model M \\",
        "    --upstream https://api.example.com/v1 --api-key-env KEY",
        "penstock rollout --agent opencode --task task.yaml --models models.yaml",
    ),
    "branch": (
        "penstock branch ROLLOUT 3 -n 8",
        "penstock branch ROLLOUT 3 --answer answer.json",
    ),
    "watch": (
        "penstock watch",
        "penstock watch --run run-7 --by step",
        "penstock watch --group GROUP --json | jq .reward.value",
    ),
    "metrics": (
        "penstock metrics run-7",
        "penstock metrics run-7 --name loss --json | jq .values",
        "penstock metrics run-7 --delete --from-step 200",
    ),
    "pause": (
        "penstock pause ROLLOUT --for 600",
        'penstock pause GROUP --reason "new weights"',
    ),
    "resume": ("penstock resume ROLLOUT",),
    "cancel": ('penstock cancel GROUP --reason "wrong task"',),
    "drain": (
        "penstock drain sandbox/n0 --wait",
        "penstock drain sandbox/n0 --undo",
    ),
    "replay": (
        "penstock replay ROLLOUT",
        "penstock replay ROLLOUT --all --tokens | less -R",
        "penstock replay turns.jsonl@ROLLOUT",
    ),
    "diff": (
        "penstock diff ROLLOUT OTHER",
        "penstock diff GROUP",
    ),
    "bias": ("penstock bias run-7", "penstock bias run-7 --trained trained-ids.txt --json"),
    "regrade": ("penstock regrade run-7 --verifier strict.yaml --name strict",),
    "rewards": ("penstock rewards diff run-7",),
    "rewards diff": (
        "penstock rewards diff run-7",
        "penstock rewards diff run-7 --grade strict --limit 0 --json",
    ),
    "annotate": (
        "penstock annotate ROLLOUT --name helpfulness --author me --value 0.8",
        "penstock annotate ROLLOUT --file judged.jsonl --author judge-v2",
    ),
    "terminal": (
        "penstock terminal task.yaml",
        "penstock terminal task.yaml --answer 42 < commands.txt",
    ),
    "agents": (
        "penstock agents",
        "penstock agents --json | jq -r .name",
    ),
    "agents list": ("penstock agents list --json | jq -r .name",),
    "agents show": (
        "penstock agents show opencode",
        "penstock agents show opencode --full",
        "penstock agents show opencode > mine.yaml",
    ),
    "agents new": (
        "penstock agents new mine --npm mine@1.2.3",
        "penstock agents new mine --pypi mine==1.2.3 --file agents/mine.yaml",
    ),
    "agents check": (
        "penstock agents check mine.yaml",
        "penstock agents check mine.yaml --run --replay",
    ),
    "agents register": ("penstock agents register mine.yaml",),
    "tasks": (
        "penstock tasks new mend-a-bug",
        "penstock tasks check mend-a-bug",
    ),
    "tasks new": ("penstock tasks new mend-a-bug --in tasks",),
    "tasks check": ("penstock tasks check tasks",),
    "tasks lock": ("penstock tasks lock jq tree --to debian.txt",),
    "tasks schema": ("penstock tasks schema > task.schema.json",),
    "tasks import": (
        "penstock tasks import harbor downloads/terminal-bench tasks",
        "penstock tasks import swe records.jsonl tasks --only django__django-11099",
    ),
    "tasks build": ("penstock tasks build tasks",),
    "tasks prove": ("penstock tasks prove tasks --concurrency 8",),
    "tasks assay": ("penstock tasks assay tasks --solutions 5",),
    "eval": (
        "penstock eval run tasks --agent opencode -n 5 --out runs/evals/mine",
        "penstock eval show runs/evals/mine",
    ),
    "eval run": (
        "penstock eval run tasks --agent opencode -n 5 --out runs/evals/mine",
        'penstock eval run tasks --agent shell --task "sort-*" --report report.html',
    ),
    "eval matrix": (
        "penstock eval matrix tasks --agent codex --agent opencode --agent pi -n 5",
        "penstock eval matrix tasks --agent codex --agent pi --picture matrix.png",
    ),
    "eval show": ("penstock eval show runs/evals/mine",),
    "eval report": ("penstock eval report runs/evals/mine --out report.html",),
    "eval diff": ("penstock eval diff runs/evals/before runs/evals/after",),
    "openenv": ("penstock openenv serve --agent opencode",),
    "openenv serve": ("penstock openenv serve --agent opencode --port 8000",),
    "doctor": (
        "penstock doctor",
        "penstock doctor --live",
        "penstock doctor --attack --backend local",
    ),
    "credentials": (
        "penstock credentials --host train.example.com",
        "penstock credentials --namespace team-a --days 90",
    ),
    "export": (
        "penstock export rows.jsonl --run-id run-7",
        "penstock export turns.parquet --table turns --bodies",
    ),
    "verify": (
        "penstock verify turns.jsonl",
        "penstock verify turns.jsonl --sequences rows.jsonl",
    ),
    "scan": (
        "penstock scan run-7",
        "penstock scan turns.jsonl --severity low",
    ),
    "gap": (
        "penstock gap rows.jsonl --trainer logprobs.npz",
        "penstock gap rows.jsonl --max-kl 0.01",
    ),
    "conformance": ("penstock conformance --model MODEL",),
    "mcp": (
        "penstock mcp",
        "penstock mcp --files runs --files tasks --allow-writes",
    ),
    "completion": ("penstock completion bash",),
}
"""By the words of the command; the empty one is the program."""


def add_examples(app: typer.Typer) -> None:
    """Ends the help of every command of a program with its examples."""
    _add(app, ())


def _add(app: typer.Typer, path: tuple[str, ...]) -> None:
    for command in app.registered_commands:
        name = command.name or get_command_name(command.callback.__name__ if command.callback else "")
        command.epilog = epilog((*path, name))
    for group in app.registered_groups:
        name = str(group.name)
        group.epilog = epilog((*path, name))
        if group.typer_instance is not None:
            _add(group.typer_instance, (*path, name))


def epilog(path: Sequence[str]) -> str | None:
    """Returns the end of a command's help; None without examples."""
    lines = EXAMPLES.get(" ".join(path))
    # \b keeps the lines as they are: a help's other paragraphs are filled.
    return None if lines is None else "\n".join(("\b", "Examples:", *(f"  {line}" for line in lines)))
