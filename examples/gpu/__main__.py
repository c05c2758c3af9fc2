"""`python -m examples.gpu MODEL`: agents before and after GRPO on repository tasks, as a table.

Evaluates every agent on the tasks of `test`, trains with some of them on those of `train`, and evaluates all again with
the trained model. `--dry-run` does the same with a tiny model on a CPU.
"""

import argparse
import asyncio
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from examples.gpu import repositories, table, tiny
from examples.gpu.phases import choices, evaluate, evaluated, services
from examples.gpu.plan import TRAINERS, Plan

from penstock.evaluation import Summary
from penstock.tasks.sets import load_tasks

ROOT: Final = Path(__file__).resolve().parents[2]
AGENTS: Final = ("codex", "claude-code", "opencode", "pi")
UNSEEN: Final = ("mini-swe-agent",)


def parsed(arguments: Sequence[str] | None = None) -> tuple[Plan, str]:
    """Returns the plan of a command line and the Python of its trainer; a wrong one ends the program."""
    parser = argparse.ArgumentParser(prog="python -m examples.gpu", description=__doc__)
    parser.add_argument("model", type=Path, nargs="?", help="directory of an open model of 0.5 to 4 billion parameters")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), help="where all results come (default: runs/gpu)")
    parser.add_argument(
        "--tasks", type=Path, help="directory with the task sets `train` and `test`; default: made here"
    )
    parser.add_argument("--agent", action="append", help=f"trained with; repeat (default: {', '.join(AGENTS)})")
    parser.add_argument("--unseen", action="append", help=f"only evaluated; repeat (default: {', '.join(UNSEEN)})")
    parser.add_argument("--trainer", choices=TRAINERS, default="trl")
    parser.add_argument("--trainer-python", default=sys.executable, help="the Python that has the trainer")
    parser.add_argument("--steps", type=int, help="optimizer steps (60)")
    parser.add_argument("--groups", type=int, help="groups of rollouts a step (8)")
    parser.add_argument("--group-size", type=int, help="rollouts of a group (8)")
    parser.add_argument("--attempts", type=int, help="of each agent at each task of `test` (4)")
    parser.add_argument("--concurrency", type=int, help="rollouts at once in evaluations (16)")
    parser.add_argument("--learning-rate", type=float, help="of Adam (1e-6)")
    parser.add_argument("--context-tokens", type=int, help="prompt and answers together (32768)")
    parser.add_argument("--prompt-tokens", type=int, help="an agent's first prompt, for verl (20480)")
    parser.add_argument("--response-tokens", type=int, help="all that follows it, for verl (12288)")
    parser.add_argument(
        "--training-memory", type=float, default=0.3, help="share of each GPU for vLLM beside the trainer"
    )
    parser.add_argument("--dry-run", action="store_true", help="a tiny model on a CPU, few tasks, few steps")
    given = parser.parse_args(arguments)
    out = given.out.absolute()
    if given.dry_run and given.model:
        parser.error("MODEL: --dry-run makes its own")
    if not given.dry_run and given.model is None:
        parser.error("MODEL: the model's directory, or --dry-run")
    if not given.dry_run and (missing := missing_parts(given.trainer, given.trainer_python)):
        parser.error(missing)
    out.mkdir(parents=True, exist_ok=True)
    values = tiny.write(out / "made") if given.dry_run else _on_gpus(given, out)
    if given.tasks is not None:
        values["tasks"] = given.tasks.absolute()
    named: tuple[str, ...] = ("steps", "groups", "group_size", "attempts", "concurrency", "learning_rate")
    named += ("context_tokens", "prompt_tokens", "response_tokens")
    values |= {name: value for name in named if (value := getattr(given, name)) is not None}
    values |= {name: tuple(value) for name in ("agent", "unseen") if (value := getattr(given, name))}
    if "agent" in values:
        values["agents"] = values.pop("agent")
    rest: dict[str, Any] = {"tiny": False, "gpus": 0, "sandbox": {}} | values
    plan = Plan(out=out, trainer=given.trainer, **rest)
    if faults := plan.faults():
        parser.error("; ".join(faults))
    if changes := plan.changes():
        parser.error(f"--out: {out} has a run with other values of {', '.join(changes)}; use another directory")
    return plan, given.trainer_python


def missing_parts(trainer: str, python: str) -> str:
    """What a run on GPUs lacks here, in one sentence; empty = nothing."""
    parts = []
    if not gpus():
        parts.append("an NVIDIA GPU (there is none in /proc/driver/nvidia/gpus)")
    if importlib.util.find_spec("vllm") is None:
        parts.append("vLLM in this environment (docs/guides/gpu.md)")
    probe = [python, "-c", f"import {trainer}"]
    if subprocess.run(probe, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False).returncode:
        parts.append(f"{trainer} in the environment of {python}")
    return f"this machine lacks {', '.join(parts)}; --dry-run needs no GPU" if parts else ""


def gpus() -> int:
    """How many NVIDIA GPUs this process may use."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    there = len([*Path("/proc/driver/nvidia/gpus").glob("*")])
    return there if visible is None else min(there, len([device for device in visible.split(",") if device]))


def _on_gpus(given: argparse.Namespace, out: Path) -> dict[str, Any]:
    tasks = out / "made" / "tasks"
    if given.tasks is None:
        repositories.write(tasks / "train", repositories.TRAINED)
        repositories.write(tasks / "test", repositories.HELD_OUT)
    # One model that fits a GPU: several of them answer in parallel, each with a copy.
    options = {"dtype": "bfloat16", "data_parallel_size": str(gpus())}
    return {
        "model": given.model.absolute(), "tasks": tasks, "agents": AGENTS, "unseen": UNSEEN,
        "steps": 60, "groups": 8, "group_size": 8, "attempts": 4, "concurrency": 16, "learning_rate": 1e-6,
        "context_tokens": 32_768, "prompt_tokens": 20_480, "response_tokens": 12_288, "answer_tokens": 4096,
        "max_calls": 30, "agent_seconds": 900.0, "gpus": gpus(),
        "engine_options": {**options, "gpu_memory_utilization": "0.85"},
        "training_options": {**options, "gpu_memory_utilization": str(given.training_memory)},
        "agent_options": {},
    }  # fmt: skip


async def run(plan: Plan, python: str) -> Path:
    """Runs the three phases; returns the table's file. What `out` has of an interrupted run is not done again.

    Raises subprocess.CalledProcessError: the trainer failed.
    """
    if plan.tiny:  # compiling kernels for so small a model takes minutes
        os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
    began, seconds = time.monotonic(), dict[str, float]()
    file = plan.write()

    def lap(phase: str) -> None:
        seconds[phase] = round(time.monotonic() - began - sum(seconds.values()), 1)

    before = await _evaluation(plan, plan.model, "before")
    lap("before")
    trains = plan.trainer == "trl" or not plan.tiny
    if not plan.trained.is_dir():
        await _train(plan, file, python, trains)
    lap("training")
    after: dict[str, Summary] = {}
    if trains:
        after = await _evaluation(plan, plan.trained, "after")
        lap("after")
    found = table.rows(before, after, plan.agents)
    about = {"dry_run": plan.tiny, "trainer": plan.trainer, "seconds": seconds}
    return table.write(plan.out, found, about, _notes(plan, seconds))


async def _evaluation(plan: Plan, model: Path, name: str) -> dict[str, Summary]:
    if (found := evaluated(plan, plan.out / name)) is not None:
        return found
    async with services(plan, model, "vllm", plan.engine_options) as (ps, _):
        return await evaluate(ps, plan, plan.out / name)


async def _train(plan: Plan, file: Path, python: str, trains: bool) -> None:
    """The trainer's own process. verl has engines of its own when it trains; else vLLM answers."""
    own = plan.trainer == "verl" and trains
    engine, options = ("none", {}) if own else ("vllm", plan.training_options)
    async with services(plan, plan.model, engine, options) as (ps, connection):
        agents = [
            {"name": choice.name, "options": dict(choice.options), "skip_permissions": choice.skip_permissions}
            for name, choice in (await choices(ps, plan)).items()
            if name in plan.agents
        ]
        command = [python, "-m", f"examples.gpu.with_{plan.trainer}", str(file), str(connection), json.dumps(agents)]
        command += [] if trains else ["--to-tensors"]
        environment = dict(os.environ)
        if plan.trainer == "trl" and plan.gpus > 1:
            # Of several GPUs one process would make torch's DataParallel, which TRL does not expect.
            environment["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
        process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, env=environment)
        try:
            code = await process.wait()
        finally:
            if process.returncode is None:
                process.terminate()
                await process.wait()
    if code:
        raise subprocess.CalledProcessError(code, command)


def _notes(plan: Plan, seconds: dict[str, float]) -> list[str]:
    tasks = len(load_tasks(plan.tasks / "test").tasks)
    notes = [
        f"pass@1 with its 95 % interval over {tasks} tasks that were not trained on, {plan.attempts} attempts each; "
        "p of the exact paired permutation test over tasks.",
        f"{plan.trainer}: {plan.steps} steps of {plan.groups} groups of {plan.group_size} rollouts; this call took "
        + ", ".join(f"{phase} {value:.0f} s" for phase, value in seconds.items())
        + ".",
    ]
    if plan.tiny:
        notes.append(
            "**Dry run: a tiny model made on the spot, on a CPU. Not run on a GPU; the shares say nothing of it.**"
        )
        if plan.trainer == "verl":
            notes.append("verl was driven up to its tensors (verl/tensors.json); nothing was trained.")
    return notes


def main() -> None:
    """Runs, and prints the table."""
    plan, python = parsed()
    file = asyncio.run(run(plan, python))
    print(file.read_text("utf-8"))
    print(f"in {file}")


if __name__ == "__main__":
    main()
