"""`penstock demo`: which agent, which seed; trains, and says what to do next."""

from __future__ import annotations

import argparse
import asyncio
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from penstock.cli.examples import EXAMPLES
from penstock.client import PenstockError
from penstock.values.similar_names import did_you_mean, did_you_mean_option
from penstock_demo import model, train
from penstock_demo.display import Display, Metrics, reasons, recent, save_picture
from penstock_demo.repairs import agent as repairs_agent
from penstock_demo.repairs import train as repairs
from penstock_demo.tasks import build_codec
from penstock_demo.train import COLLECT, RUNS, Course, from_here, new_run, seed_number


@dataclass(frozen=True, slots=True)
class Demo:
    """What the demo does with an agent.

    `learn` trains: the command line, the run's directory, the display. `picture` is the curve's title. `goal_steps` is
    over how many steps success is averaged. `task` is the file of a task, `remark` says what the trained model is for.
    `own` is a rollout of its agent with that model, and `installed` is where the sandbox service has the agent, both
    for what is printed at the end.
    """

    learn: Callable[[argparse.Namespace, Path, Display], list[Metrics]]
    runs: Path
    picture: str
    max_steps: int
    goal_steps: int
    task: Path
    remark: str
    own: str
    installed: Path | None = None


def _shell(given: argparse.Namespace, run: Path, display: Display) -> list[Metrics]:
    start, codec = time.perf_counter(), build_codec()
    learner = train.warm_start(codec, given.seed, run, display)
    course = Course(given.seed, given.steps, COLLECT[given.credit])
    return asyncio.run(train.train(learner, codec, course, run, start, display))


def _repairs(given: argparse.Namespace, run: Path, display: Display) -> list[Metrics]:
    return repairs.learn(given.seed, given.steps, run, display)


HERE = Path(__file__).parent
DEMOS = {
    "shell": Demo(
        _shell,
        RUNS,
        "A 0.13 M parameter model learns to use a shell",
        train.MAX_STEPS,
        train.WINDOW,
        HERE / "task.yaml",
        "its context is 1,024 tokens, too short for what opencode, pi and such ask",
        "{penstock} rollout --agent shell --task {task} --model-dir {model}",
    ),
    "mini-swe-agent": Demo(
        _repairs,
        repairs.RUNS,
        "A 0.12 M parameter model learns to repair scripts with mini-SWE-agent",
        repairs.MAX_STEPS,
        repairs.WINDOW,
        HERE / "repairs" / "task.yaml",
        "it knows the prompts of this demo alone, which the agent has by its configuration",
        # The agent is one that the run registered with its services, so it is theirs alone.
        f"{{penstock}} rollout --agent {repairs_agent.CHOICE.name} --option max_turns={repairs_agent.STEPS}"
        " --task {task} --state-dir {services}\n    (in another terminal, while those services run)",
        repairs.RUNS / "cache" / "sandbox",
    ),
}


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Returns what the command line says; a wrong one ends the program.

    Args:
        argv: the arguments; None = the program's.
    """
    examples = "\n".join(("Examples:", *(f"  {line}" for line in EXAMPLES["demo"])))
    parser = argparse.ArgumentParser(
        prog="penstock demo",
        description="Train a small model by GRPO through all four services.",
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    most = ", ".join(f"{demo.max_steps} with {name}" for name, demo in DEMOS.items())
    options = (
        parser.add_argument("--seed", type=seed_number, default=1, help="seed that repeats a run (default 1)"),
        parser.add_argument(
            "--agent",
            type=partial(_one_of, "agent", tuple(DEMOS)),
            metavar=_choice(DEMOS),
            default="shell",
            help="the agent: ours, which starts in milliseconds (default), or one from PyPI, which starts in seconds",
        ),
        parser.add_argument("--steps", type=_step_count, help=f"most steps (default {most})"),
        parser.add_argument(
            "--credit",
            type=partial(_one_of, "credit", tuple(COLLECT)),
            metavar=_choice(COLLECT),
            default="rollout",
            help="what an advantage is of: a rollout among its group (default), or a turn among its branches",
        ),
    )
    given, unknown = parser.parse_known_args(argv)
    if unknown:
        known = ["--help", *(name for option in options for name in option.option_strings)]
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{did_you_mean_option(unknown[0], known)}")
    if given.agent != "shell" and given.credit != "rollout":
        parser.error(f"--credit {given.credit} is for --agent shell")
    return given


def main() -> None:
    """Reads the command line, trains, and says what to do next."""
    given = parse()
    demo = DEMOS[given.agent]
    given.steps = given.steps or demo.max_steps
    model.use_compilation_cache(RUNS / "cache" / "xla")
    try:
        run = new_run(given.seed, demo.runs)
    except PenstockError as error:
        sys.exit(str(error))
    with Display(f"Penstock: GRPO on rollouts of {given.agent}, seed {given.seed}", demo.goal_steps) as display:
        try:
            history = demo.learn(given, run, display)
        except (PenstockError, ExceptionGroup) as error:
            sys.exit(f"training stopped: {reasons(error)}")
        except KeyboardInterrupt:
            sys.exit("interrupted: the services are stopped")
    save_picture(history, run / "reward.png", f"{demo.picture} (seed {given.seed})", demo.goal_steps)
    say_what_next(demo, history, given.agent)


def _choice(names: Iterable[str]) -> str:
    return "{" + ",".join(names) + "}"


def _one_of(what: str, known: Sequence[str], name: str) -> str:
    if name not in known:
        meant = did_you_mean(name, known) or ";"
        raise argparse.ArgumentTypeError(f"there is no {what} {name!r}{meant} there are {', '.join(known)}")
    return name


def _step_count(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"steps must be a whole number from 1, not {text!r}")
    return int(text)


def say_what_next(demo: Demo, history: Sequence[Metrics], agent: str) -> None:
    """Prints what a run has left, and the commands that show and use it, as one types them in the working directory."""
    last, penstock = history[-1], _typed(Path(sys.executable).with_name("penstock"))
    latest = Path(os.path.relpath(demo.runs / "latest"))
    task, window = _typed(demo.task), min(demo.goal_steps, len(history))
    # Of the run itself: what is started with them goes on when `latest` is another.
    run = latest.parent / latest.readlink() if latest.is_symlink() else latest
    model, services = _typed(run / "model"), _typed(run / "services")
    own = demo.own.format(penstock=penstock, task=task, model=model, services=services)
    # Otherwise its services would install the agent again. Absolute: the service's helpers have other directories.
    installed = "" if demo.installed is None else f" --set {shlex.quote(f'sandbox.state_dir={demo.installed}')}"
    print(
        f"\n{last['step']} steps, {last['elapsed']:.0f} s: success {history[0]['success']:.2f} ->"
        f" {recent(history, window):.2f} (mean of the last {window} steps)\n"
        f"  {latest}/reward.png           the curve\n"
        f"  {latest}/metrics.jsonl        a line per step\n"
        f"  {latest}/trajectories/        every rollout's tokens, mask, logprobs and reward\n"
        f"  {latest}/model                the trained model\n"
        f"\nTry next:\n"
        f"  {penstock} up --model-dir {model} --state-dir {services}{installed}\n"
        f"    (serves the model; its dashboard shows these rollouts)\n"
        f"  {own}\n"
        f"    ({demo.remark}; other agents want another model:)\n"
        f"  {penstock} rollout --agent opencode --task {task} --upstream URL --model M --api-key-env NAME\n"
    )


def _typed(path: Path) -> str:
    return shlex.quote(str(from_here(path)))
