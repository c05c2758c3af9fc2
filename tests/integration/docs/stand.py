"""Where the pages' blocks are run: one stack of real services with a small random model, and a directory for each page.

A page takes things for granted: a trainer's engine, a task file, an evaluation that was run before. `names` and
`prepare` are what it finds, by page; nothing of it is shown to a reader.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import orjson
import yaml
from tests.integration.docs.blocks import ALL
from tests.support.endpoints.upstream import vendor
from tests.support.policy import CODEC, FILES
from tests.support.services.forked_commands import forked_commands
from tests.support.services.stack import disjoint_uids
from tests.unit.docs.pages import ROOT

from penstock.analysis.export import write
from penstock.client import Completion, Inference, Mode, Penstock, Sampling, Task, connect
from penstock.client.transport.endpoints import CONNECTION_FILE, write_connection
from penstock.client.types.trajectories import Trajectory
from penstock.local.stack import LocalStack
from penstock.tasks.scaffold import files
from penstock_codec.chat import Message, Tool
from penstock_inference.testing import random_config, random_tensors, write_model

REPLACED: Final[Mapping[str, str]] = {
    '"opencode"': '"shell"',
    "--agent opencode": "--agent shell",
    ', "skip_permissions": True': "",
    "range(100)": "range(1)",
}
"""What a page says and what is run: an agent that starts in milliseconds, one step of a hundred. Agents that people use
are run by tests/conformance/agents and tests/e2e."""


CONFIG: Final = random_config(
    "qwen3", vocab_size=CODEC.vocab_size, max_position_embeddings=2048, eos_token_id=FILES.stop_token_ids[0]
)


@dataclass(frozen=True)
class Stand:
    """The services, a client of theirs, the model that they serve, and an OpenAI-compatible endpoint."""

    folder: Path
    ps: Penstock
    model: Path
    connection: Path
    endpoint: str
    commands: Path
    """The directory of the program `penstock`."""

    def stage(self, page: str) -> Path:
        """A directory for a page's blocks, with what every page finds there."""
        stage = self.folder / page.replace("/", "-")
        if not stage.exists():
            stage.mkdir()
            (stage / "task.yaml").write_text(block("docs/guides/first-rollout.md", "yaml task"), encoding="utf-8")
            (stage / "examples").symlink_to(ROOT / "examples")
            (stage / "runs/demo/latest").mkdir(parents=True)
            for name in ("runs/demo/latest/model", "model"):
                (stage / name).symlink_to(self.model)
            (stage / "my-model").symlink_to(self.folder / "a-tokenizer")
        return stage

    def replaced(self, text: str) -> str:
        """A block or command as it is run."""
        for said, run in {**REPLACED, "https://api.example.com/v1": self.endpoint}.items():
            text = text.replace(said, run)
        return text

    def environment(self, stage: Path) -> dict[str, str]:
        """Of the commands: the program that is tested, and these services."""
        return {
            "PATH": f"{self.commands}:{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin",
            "HOME": str(stage),
            "PENSTOCK_CONNECTION": str(self.connection),
            "EXAMPLE_API_KEY": "a key",
            "LANG": "C.UTF-8",
        }


class Engine:
    """A trainer's own, as the pages call it."""

    version = 0

    def __init__(self, ps: Penstock) -> None:
        self._ps = ps

    async def generate(self, prompt: Any, sampling: Sampling) -> Completion:
        """A few tokens."""
        return await self._ps.inference.generate(prompt, sampling.replace(max_tokens=8, temperature=1.0))

    async def sample(self, prompt: Any, sampling: Sampling) -> tuple[Any, Any, str]:
        """The same as ids, logprobs and the reason of their end."""
        made = await self.generate(prompt, sampling)
        return made.token_ids, made.logprobs, made.finish_reason


def weights() -> dict[str, Any]:
    """A model's that likes no token much more than another, so that it repeats none for ever."""
    return {name: 0.1 * array if "embed" in name else array for name, array in random_tensors(CONFIG).items()}


def block(page: str, kind: str) -> str:
    """The first block of a kind on a page."""
    return next(item.text for item in ALL if item.page == page and item.kind == kind)


@asynccontextmanager
async def standing(folder: Path) -> AsyncIterator[Stand]:
    """Starts everything."""
    folder.chmod(0o755)
    model = write_model(folder / "a-model", CONFIG, weights())
    FILES.write(model)
    # A random model would ramble on: every fourth token ends its turn.
    stops = {"eos_token_id": [*FILES.stop_token_ids, *range(20, CODEC.vocab_size, 4)]}
    (model / "generation_config.json").write_bytes(orjson.dumps(stops))
    FILES.write(folder / "a-tokenizer")
    settings: dict[str, dict[str, Any]] = {"sandbox": {"first_uid": disjoint_uids()}}
    stack = LocalStack(model_dir=model, state_dir=folder / "state", settings=settings)
    with forked_commands() as commands:
        async with stack, connect(stack.endpoints) as ps, vendor() as upstream:
            connection = folder / CONNECTION_FILE
            write_connection(connection, stack.endpoints, pid=None)
            yield Stand(folder, ps, model, connection, upstream.base_url, commands)


async def _results(stand: Stand, run_id: str, n: int = 2, task: Task | None = None) -> list[Any]:
    group = await stand.ps.groups.create(
        task or Task.load(stand.stage("shared") / "task.yaml"),
        "shell",
        n,
        run_id=run_id,
        mode=Mode.TRANSPARENT_PROXY,
        source=Inference(),
        sampling=Sampling(temperature=1.0),
    )
    return [result for result in await group.results(samples_only=False) if result.trajectory is not None]


def _write_tasks(stage: Path) -> None:
    """A task set as docs/guides/tasks.md shows it."""
    folder = stage / "tasks/greet"
    (folder / "repository").mkdir(parents=True)
    (folder / "repository/greet.py").write_text("print('hello')\n", encoding="utf-8")
    (folder / "check.py").write_text("print('1')\n", encoding="utf-8")
    (folder / "task.yaml").write_text(block("docs/guides/tasks.md", "yaml task"), encoding="utf-8")
    other = block("docs/guides/first-rollout.md", "yaml task").replace("task_id: greet", "task_id: sort")
    (stage / "tasks/sort.yaml").write_text(other, encoding="utf-8")


def _write_task_set(stage: Path) -> None:
    """Two tasks that any backend runs."""
    (stage / "tasks").mkdir()
    for name in ("greet", "sort"):
        text = block("docs/guides/first-rollout.md", "yaml task").replace("task_id: greet", f"task_id: {name}")
        (stage / f"tasks/{name}.yaml").write_text(text, encoding="utf-8")


def _write_own(stage: Path, page: str) -> None:
    """What a reader of the page has saved: the agent and the task."""
    (stage / "fixer.yaml").write_text(block(page, "yaml agent"), encoding="utf-8")
    (stage / "train.yaml").write_text(block(page, "yaml task"), encoding="utf-8")


def _write_repository(folder: Path) -> None:
    """The repository of a task that `penstock tasks new` wrote."""
    for name, text in files().items():
        if name.startswith("repository/"):
            place = folder / name
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(text, encoding="utf-8")


async def _evaluate(stand: Stand, stage: Path) -> None:
    """An evaluation that was made before, to compare with."""
    words = ["eval", "run", "tasks", "--agent", "shell", "--upstream", stand.endpoint, "--model", "some-model"]
    process = await asyncio.create_subprocess_exec(
        *(str(stand.commands / "penstock"), *words, "--out", "runs/evals/other"),
        cwd=stage,
        env=stand.environment(stage),
        stdout=asyncio.subprocess.DEVNULL,
    )
    assert await process.wait() == 0


async def prepare(stand: Stand, page: str) -> None:
    """Files that a page's commands take for granted."""
    stage = stand.stage(page)
    match page:
        case "docs/guides/tasks.md":
            _write_tasks(stage)
        case "docs/guides/models.md":
            listed = yaml.safe_load(block(page, "yaml task"))["models"]
            # There is one inference service, the default one.
            listed = [one | {"inference": ""} if "inference" in one else one for one in listed]
            (stage / "models.yaml").write_text(yaml.safe_dump(listed), encoding="utf-8")
        case "docs/guides/own-repository.md":
            _write_own(stage, page)
        case "docs/guides/eval.md":
            _write_task_set(stage)
            await _evaluate(stand, stage)
        case "docs/guides/gap.md":
            results = await _results(stand, "run-7")
            trajectories = [result.trajectory for result in results]
            for name in ("samples.parquet", "samples.jsonl"):
                await write(_each(trajectories), stage / name)
            samples = [sample for trajectory in trajectories for sample in trajectory.samples]
            np.savez(stage / "mine.npz", **{sample.sample_id: sample.logprobs for sample in samples})
            text = (stage / "samples.jsonl").read_text(encoding="utf-8")
            (stage / "samples.jsonl").write_text(_with_column(text), encoding="utf-8")


async def _each(trajectories: list[Trajectory]) -> AsyncIterator[Trajectory]:
    for trajectory in trajectories:
        yield trajectory


def _with_column(rows: str) -> str:
    lines = [orjson.loads(line) for line in rows.splitlines()]
    return "".join(orjson.dumps(row | {"mine": row["logprobs"]}).decode() + "\n" for row in lines)


@asynccontextmanager
async def names(stand: Stand, page: str) -> AsyncIterator[dict[str, Any]]:
    """The names that a page's programs take for granted."""
    stage = stand.stage(page)
    task = Task.load(stage / "task.yaml")
    async with AsyncExitStack() as stack:
        found: dict[str, Any] = {"__name__": "__main__", "ps": stand.ps, "engine": Engine(stand.ps), "task": task}
        match page:
            case "docs/guides/your-own-trainer.md":
                found |= await _trainer(stand, stack)
            case "docs/guides/replicas.md":
                found |= {"version": await _next_version(stand), "weights": weights()}
            case "docs/guides/failures.md":
                await stack.enter_async_context(_answering(stand.ps))
            case "docs/guides/branches.md":
                parent = await stand.ps.rollouts.create(task, "shell", mode="transparent_proxy", source=Inference())
                await parent.result()
                found["parent"] = parent
            case "docs/guides/regrade.md":
                ended = await stand.ps.rollouts.create(
                    task, "shell", run_id="my-run", mode="transparent_proxy", source=Inference()
                )
                found["rollout_id"] = (await ended.result()).rollout_id
            case "docs/guides/gap.md":
                found |= await _gap(stand)
            case "docs/guides/rewards.md":
                (stage / "sum.yaml").write_text(block(page, "yaml task"), encoding="utf-8")
                found["rollout"] = await stand.ps.rollouts.create(
                    Task.load(stage / "sum.yaml"), "shell", mode="transparent_proxy", source=Inference(),
                )  # fmt: skip
            case "docs/guides/own-repository.md":
                _write_own(stage, page)
                _write_repository(stage / "repair-slug")
                await stand.ps.agents.register(stage / "fixer.yaml")
            case "docs/guides/trainers.md":
                results = await _results(stand, "trainers")
                tokenizer, made = SimpleNamespace(pad_token_id=0), SimpleNamespace(from_dict=dict)
                found |= {"results": results, "tokenizer": tokenizer, "Sample": made, "tensors_of": dict}
                found |= dict.fromkeys(("TrainingSample", "Experience"), dict)
                found["group"] = SimpleNamespace(results=_given(results))
                found["forward"] = lambda ids, positions, visible: np.zeros((len(ids), int(ids.max()) + 1))
            case "docs/guides/sandboxes.md":
                found["sandbox"] = await stack.enter_async_context(await stand.ps.sandboxes.create())
            case "docs/guides/terminal.md":
                found["policy"] = _policy()
            case "libs/chassis/README.md":
                found |= _chassis()
            case "libs/codec/README.md":
                found |= _codec()
        yield found


def _given(value: Any) -> Callable[[], Any]:
    async def give() -> Any:
        return value

    return give


async def _trainer(stand: Stand, stack: AsyncExitStack) -> dict[str, Any]:
    session = await stack.enter_async_context(stand.ps.intercept(run_id="shown", policy_version=0))
    results = await _results(stand, "learned-from")
    return {
        "session": session,
        "version": await _next_version(stand),
        "weights": weights(),
        "group": SimpleNamespace(results=_given(results)),
        "corpus": SimpleNamespace(search=None),
        "path": stand.model,
        "run_my_agent": _no_agent,
    }


async def _next_version(stand: Stand) -> int:
    """The pages share an engine."""
    return (await stand.ps.inference.info()).policy_version + 1


async def _no_agent(base_url: str, api_key: str) -> None:
    """An agent of the reader's own, that makes no call."""
    assert base_url.startswith("http") and api_key


@asynccontextmanager
async def _answering(ps: Penstock) -> AsyncIterator[None]:
    """A trainer beside the page's program."""
    async with ps.intercept() as session:

        async def answer() -> None:
            async for call in session.calls():
                await call.delegate()

        answering = asyncio.create_task(answer())
        yield
        session.finish()
        await answering


async def _gap(stand: Stand) -> dict[str, Any]:
    results = await _results(stand, "gap")
    sample = next(sample for result in results for sample in result.trajectory.samples)
    return {
        "results": results,
        "engine_logprobs": sample.logprobs,
        "trainer_logprobs": sample.logprobs,
        "loss_mask": sample.loss_mask,
        "trainer_logprobs_of": lambda sample: sample.logprobs,
    }


def _policy() -> Callable[[list[dict[str, Any]]], str]:
    said = iter(["terminal(command='echo hi > out.txt')", "terminal(final_answer='done')"])
    return lambda messages: next(said)


def _chassis() -> dict[str, Any]:
    from contextlib import asynccontextmanager

    from penstock_chassis.journal import Journal
    from penstock_chassis.server import Service, run
    from penstock_sandbox.settings import SandboxSettings

    return {
        "asynccontextmanager": asynccontextmanager,
        "AsyncIterator": AsyncIterator,
        "Journal": Journal,
        "SandboxSettings": SandboxSettings,
        "Service": Service,
        "run": run,
    }


def _codec() -> dict[str, Any]:
    from penstock_codec import Codec, TokenizerFiles

    return {
        "Codec": Codec,
        "TokenizerFiles": TokenizerFiles,
        "messages": [Message.user("Hello.")],
        "tools": [Tool(name="bash", description="Run a command.", parameters_json_schema='{"type": "object"}')],
        "completion_ids": [*FILES.stop_token_ids[:1]],
        "tool_result": Message.user("And then?"),
    }


def clear(stage: Path) -> None:
    """Forgets a page's directory."""
    shutil.rmtree(stage, ignore_errors=True)
