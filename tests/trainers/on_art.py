"""ART: its gathering runs our rollout function, and its local backend packs the tensors for the trainer."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import re
import sys
import typing
from pathlib import Path
from typing import Any

import numpy as np
import typing_extensions
from aiohttp import web
from tests.trainers.driven import EXAMPLES, PER_TASK, TASK_IDS, VERSION, Driven, Learned


class Older(importlib.abc.MetaPathFinder):
    """ART wants Python 3.12, for which its statements `type` and functions with type parameters are rewritten here.

    Nothing else of its sources changes; annotations are not evaluated.
    """

    REWRITTEN = (
        (re.compile(r"^type (\w+)\[(\w+)\] = ", re.M), r'\2 = __import__("typing").TypeVar("\2"); \1 = '),
        (re.compile(r"^type (\w+) = ", re.M), r"\1 = "),
        (re.compile(r"^((?:async )?def \w+)\[[^\]]+\]\(", re.M), r"\1("),
    )

    class Loader(importlib.machinery.SourceFileLoader):
        """Compiles what was rewritten."""

        def get_code(self, fullname: str) -> Any:
            """See Python."""
            text = self.get_data(path := self.get_filename(fullname)).decode()
            for found, put in Older.REWRITTEN:
                text = found.sub(put, text)
            return self.source_to_code(text.encode(), path)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """See Python."""
        if not name.startswith("art."):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
            return None
        text = Path(spec.origin).read_text()
        if any(found.search(text) for found, _ in self.REWRITTEN):
            spec.loader = self.Loader(name, spec.origin)
        return spec


if sys.version_info < (3, 12):
    sys.meta_path.insert(0, Older())
    typing.override = typing_extensions.override  # type: ignore[attr-defined]

import art  # noqa: E402
from art.local import LocalBackend  # noqa: E402

from penstock.adapters.trainers import Dropped, DropReason, Place, Selection, select  # noqa: E402
from penstock.adapters.trainers import art as form  # noqa: E402
from penstock.adapters.trainers.plugins.art import made_group  # noqa: E402

LENGTH = 4096
NAME = f"agent@{VERSION}"


def server(driven: Driven) -> web.Application:
    """In the place of ART's vLLM server, by the wire of vLLM's /v1/completions."""

    async def completions(request: web.Request) -> web.Response:
        asked = await request.json()
        assert asked["model"] == NAME and asked["return_token_ids"] and asked["logprobs"] == 0
        assert asked["max_tokens"] is None or asked["max_tokens"] > 16
        ids, logprobs = driven.engine.answer(asked["prompt"])
        found = {"tokens": [""] * len(ids), "token_logprobs": logprobs, "text_offset": [0] * len(ids)}
        choice = {"index": 0, "text": "", "finish_reason": "stop", "logprobs": found, "token_ids": ids}
        return web.json_response(
            {"id": "c", "object": "text_completion", "created": 0, "model": NAME, "choices": [choice]}
        )

    app = web.Application()
    app.add_routes([web.post("/v1/completions", completions)])
    return app


async def run(driven: Driven, folder: Path) -> tuple[list[str], list[str]]:
    """Returns what was seen, and what is wrong."""
    sys.path.insert(0, str(EXAMPLES))
    example = importlib.import_module("art_agent")
    runner = web.AppRunner(server(driven))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    model = art.TrainableModel(
        name="agent",
        run_name="agent",
        project="penstock",
        base_model=str(driven.model),
        base_path=str(folder / "art"),
        _internal_config={"init_args": {"max_seq_length": LENGTH}},
    )
    # What registering sets; it starts vLLM.
    model.inference_base_url, model.inference_api_key = f"http://127.0.0.1:{runner.addresses[0][1]}/v1", "none"
    model.inference_model_name = NAME
    try:
        groups = await art.gather_trajectory_groups(example.gather(model, one, PER_TASK) for one in TASK_IDS)
        failures = await _failures_differ(model, example.rollout)
    finally:
        await model.openai_client().close()
        await runner.cleanup()
    backend = LocalBackend(path=str(folder / "art"))
    packed = backend._get_packed_tensors(
        model,
        groups,
        advantage_balance=0.0,
        allow_training_without_logprobs=False,
        scale_rewards=False,
        plot_tensors=False,
        packed_sequence_length=LENGTH,
        logprob_calculation_chunk_size=1024,
    )
    if packed is None:
        return [], ["ART found nothing to train"]
    rows = len(packed["tokens"])
    lines, wrong = await driven.faults([learned(packed, row) for row in range(rows)])
    trajectories = [one for group in groups for one in group]
    if [[one.metadata["task_id"] for one in group] for group in groups] != [[one] * PER_TASK for one in TASK_IDS]:
        wrong.append("the groups are not those of the tasks")
    wrong += [*failures, *(fault.message for group in groups for fault in group.exceptions)]
    if {(one.initial_policy_version, one.final_policy_version) for one in trajectories} != {(VERSION, VERSION)}:
        wrong.append("the policy versions are not those of the model's name")
    wrong += await _form_differs(driven, groups)
    there = sorted(name for name, made in packed.items() if hasattr(made, "shape"))
    lines.append(f"PackedTensors of {rows} rows: {', '.join(there)}")
    return lines, wrong


async def _failures_differ(model: art.TrainableModel, rollout: Any) -> list[str]:
    """A rollout that fails stays in sight: ART has it among the exceptions of its group."""
    group = await art.trajectory_group([rollout(model, "pear")], return_exceptions=True)
    messages = [fault.message for fault in group.exceptions]
    return [] if not len(group) and len(messages) == 1 and "pear" in messages[0] else [f"a failure became {messages}"]


async def _form_differs(driven: Driven, groups: list[art.TrajectoryGroup]) -> list[str]:
    """Compares `art.trajectory_groups`, the form without a plug-in, with the trajectories that were gathered."""
    wrong = []
    for group in groups:
        trajectories = [
            await (await driven.ps.rollouts.attach(one.metadata["penstock_rollout_id"])).trajectory() for one in group
        ]
        places = select(trajectories).places
        lost = Place("lost", places[0].group, dropped=Dropped("lost", DropReason.FAILED, "infrastructure: NODE_LOST"))
        (made,) = form.trajectory_groups(Selection((*places, lost)))
        ours = made_group(made)
        if [one.model_dump() for one in ours] != [one.model_dump() for one in group]:
            wrong.append("art.trajectory_groups differs from what was gathered")
        if [fault.message for fault in ours.exceptions] != [str(lost.dropped)]:
            wrong.append(f"a dropped rollout became {ours.exceptions}")
    return wrong


def learned(packed: Any, row: int) -> Learned:
    """A row of the tensors, without its padding.

    ART keeps no rewards: their difference from the mean of 0.5 is divided by its mean size, which makes it -1 or 1.
    """
    there = packed["group_ids"][row] != -1
    trained = packed["assistant_mask"][row]
    (advantage,) = set(packed["advantages"][row][trained].tolist())
    logprobs = np.nan_to_num(packed["logprobs"][row][there].numpy())
    return Learned.of(packed["tokens"][row][there], trained[there], logprobs, (advantage + 1.0) / 2)
