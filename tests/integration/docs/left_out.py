"""What of the pages is not run here, each with its reason. This is the one place; everything else is run.

What is left out is parsed all the same: programs compile and what they import from Penstock is there; commands are a
shell's, and those of `penstock` have the options and arguments that the program has.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

PROGRAMS: Final[Mapping[str, str]] = {
    ".venv/bin/jupyter": "of a package that the reader installs; tests/e2e/test_notebook.py runs the notebook",
    ".venv/bin/python": "the repository's own programs, which other tests run or which take a quarter of an hour",
    ".venv-gpu/bin/python": "needs a GPU; tests/unit/gpu tests the programs",
    ".venv-vllm/bin/python": "the recipe's dry run, which takes minutes and vLLM; tests/unit/gpu tests the program",
    "apt-get": "changes the machine",
    "git": "names a release, which a clone of a test has not",
    "claude": "an assistant, which the reader has; test_mcp_command.py of tests/integration/client starts the server",
    "codex": "likewise",
    "cat": "shows a file of the reader's machine",
    "docker": "builds and pulls images; tests/e2e/test_compose.py runs the services as containers",
    "echo": "feeds a program that is not run",
    "eval": "of the reader's shell",
    "find": "deletes files of the reader's store",
    "exec": "the last line of a batch script, which tests/integration/slurm submits",
    "export": "sets a variable for what follows",
    "go": "changes a module of the reader's; tests/integration/go builds what the guide shows",
    "grep": "reads the logs of the reader's services",
    "podman": "serves its API on the reader's machine; tests/conformance/sandbox --backend podman starts one",
    "helm": "asks a cluster; tests/unit/deploy renders the chart, tests/kubernetes applies it",
    "jq": "reads the logs of the reader's services",
    "kubectl": "asks a cluster",
    "less": "waits for a reader",
    "mkdir": "makes a directory for the command after it",
    "mkfs.ext4": "makes a file system on a volume of the reader's",
    "mount": "likewise",
    "make": "installs, builds and measures; that each target exists is checked by tests/unit/docs",
    "npm": "installs; tests/integration/typescript installs the packed client",
    "openssl": "makes a token",
    "penstock-driver": "a service; `penstock up` starts it, flags are checked by tests/unit/docs",
    "penstock-inference": "likewise",
    "penstock-interception": "likewise",
    "penstock-sandbox": "likewise",
    "client/bin/python": "of the environment that the page makes: `make dist-check` runs the page",
    "client/bin/pip": "likewise",
    "local/bin/penstock": "likewise",
    "local/bin/pip": "likewise",
    "pip": "installs",
    "pipx": "asks the package index; `make dist-check` runs it",
    "protoc": "a package that the reader installs; tests/integration/ruby runs the guide's command",
    "pytest": "a test suite",
    "python3": "makes an environment; `make dist-check` runs it",
    "python": "tests/e2e/test_own_repository.py runs train.py; that of examples/trl wants torch: `make test-trl`;"
    " json.tool reads what a command printed: tests/unit/cli/test_cli.py; the pool's objects are for kubectl:"
    " tests/support/agent_sandbox applies them",
    "ruby": "runs a trainer; tests/integration/ruby runs it",
    "sbatch": "asks Slurm; tests/integration/slurm submits the script",
    "source": "of the reader's shell",
    "systemctl": "changes the machine",
    "uv": "asks the package index",
    "uvx": "likewise; `make dist-check` runs it",
}
"""Programs whose commands are not run."""

COMMANDS: Final[Mapping[str, str]] = {
    "penstock up --engine none": "of a page that tests/e2e/test_own_repository.py runs as its reader does, to the end",
    "penstock watch --run fixer --once": "likewise",
    "penstock up": "runs until it is stopped; tests/integration/client runs it",
    "penstock demo": "trains for minutes; tests/e2e/test_demo.py trains two steps",
    "penstock dashboard": "runs until it is stopped; tests/integration/dashboard serves it",
    "penstock watch": "goes on until its reader leaves; tests/integration/client/test_watch.py",
    "penstock replay": "of the reader's rollouts; tests/integration/client/commands/test_replay.py",
    "penstock branch": "likewise; tests/integration/client/commands/test_branch_command.py",
    "penstock diff": "likewise",
    "penstock regrade": "of the reader's run; tests/integration/client/test_regrade.py",
    "penstock rewards diff": "likewise",
    "penstock annotate": "of the reader's rollout; tests/integration/client/commands/test_annotate.py",
    "penstock export rows.parquet --run-id RUN": "likewise",
    "penstock openenv serve": "runs until it is stopped; tests/integration/openenv runs it",
    "penstock drain penstock-sandbox-1": "names a pod of a cluster; tests/faults/hosts/test_drain.py drains",
    "penstock doctor --live --state-dir penstock-12345": "of a job of Slurm; tests/faults/hosts runs it on hosts",
    "penstock tasks import": "tests/integration/evaluation imports tasks of each format",
    "penstock tasks prove": "starts services of its own, or asks the package index; tests/integration/evaluation "
    "proves tasks, and runs the commands of the guide to pytest",
    "penstock tasks assay": "dozens of rollouts; tests/integration/evaluation/test_assay.py runs it",
    "penstock scan": "of the reader's rollouts; tests/integration/evaluation/test_assay.py runs it",
    "penstock rollout --agent opencode --task tasks/greet --require-assay": "wants the lines of an assay; likewise",
    "penstock eval matrix": "installs three agents; tests/integration/evaluation/test_eval_matrix.py runs two",
    "penstock eval run tasks --agent opencode --require-assay": "likewise",
    "penstock agents check mine.yaml --install": "the package is an example's, which npm has not; "
    "tests/conformance/agents installs and runs agents",
    "penstock agents check mine.yaml --run": "likewise",
    "penstock rollout --agent shell --task examples/grpo/task.yaml --model-dir": "starts services of its own with the "
    "model that the demo trained; tests/e2e/test_demo.py trains it and tries this",
    "penstock rollout --agent shell --task examples/judge/letter.yaml --model-dir": "starts services of its own, and a "
    "model that judges; tests/faults/driver/test_judge.py runs the judge",
    "penstock rollout --agent opencode --task examples/grpo/task.yaml --model-dir": "starts services of its own, and a "
    "real agent; tests/e2e/test_agents.py runs it with a script",
    "penstock rollout --agent opencode --task fix-slug": "asks the package index; tests/integration/evaluation runs it",
    "penstock eval show runs/evals/first": "of that evaluation",
    "penstock eval report runs/evals/first": "of that evaluation",
    "penstock doctor --attack --class": "tens of rollouts; tests/security/test_redteam.py runs every attack",
    "penstock doctor --attack --only": "likewise; tests/integration/client/test_doctor_attack.py runs two",
    "penstock gap turns.jsonl --adapter": "wants adapters, which vLLM has: tests/integration/vllm",
    "penstock eval run examples/grpo/task.yaml": "starts services of its own with the model that the demo trained",
}
"""Commands of `penstock` that are not run, by how they begin."""

BLOCKS: Final[Mapping[str, str]] = {
    "# token ids, loss mask, logprobs, versions": "the program of README.md, which is run",
    "Assays.load(": "wants the lines of an assay; tests/integration/evaluation/test_assay.py makes and loads them",
    'select(classes=["survive"])': "tens of rollouts on Docker; tests/security/test_redteam.py runs every attack",
    "GenericEnvClient(base_url=ADDRESS": "the `openenv` package has its own environment: tests/integration/openenv",
    "MCPToolClient(base_url=ADDRESS": "the `openenv` package has an environment of its own: tests/integration/openenv",
    "HarnessRolloutWorker(": "wants TRL and torch: tests/integration/trl runs the real worker (`make test-trl`)",
    "ml_dtypes.bfloat16": "wants torch, PEFT and vLLM: tests/integration/vllm (`make test-vllm`)",
    'session.log({"loss": loss, "entropy"': "a line of a trainer; your-own-trainer.md has a whole one, which is run",
    "TrackioLogger(": "trackio has an environment of its own: tests/unit/adapters/test_loggers.py",
    'Stack(on="ray"': "wants a Ray cluster: tests/integration/ray starts one",
    'on="ray",\n': "likewise",
    'Stack(on="slurm"': "wants a Slurm cluster: tests/integration/slurm starts one",
    "connect() as ps:  # in the job": "of a trainer in that job: tests/integration/slurm",
    'Stack(on="kubernetes"': "wants a cluster: tests/integration/launchers has the API server's stand-in",
    "DataProto.from_dict": "wants torch and verl; the arrays are checked by tests/unit/adapters/test_trainers.py",
}
"""Programs that are not run, by a text in them."""


def reason(command: list[str]) -> str:
    """Why a command is not run; empty = it is."""
    if command[0] not in {"penstock", ".venv/bin/penstock"}:
        return PROGRAMS.get(command[0], "")
    line = " ".join(["penstock", *command[1:]])
    return next((why for start, why in COMMANDS.items() if line.startswith(start)), "")
